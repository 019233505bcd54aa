"""Caches as a server's are in the worst case, for the tests of attention."""

import torch
from torch import Tensor

from quire_kernels.kv_quantization import KVScales, kv_row_size, open_kv_cache, quantize_kv

Paged = tuple[Tensor, Tensor, Tensor, Tensor, KVScales | None]

DTYPES = (torch.bfloat16, torch.float32, torch.float16)  # what the model computes in
CACHES = (None, torch.float8_e4m3fn, torch.int8)  # what the cache holds; None: the same


def paged(
    lengths: list[int], kv_heads: int, size: int, block: int, dtype: torch.dtype, device: str, *,
    is_full: bool = False,
) -> Paged:  # fmt: skip
    """(keys, values, table, lengths, scales); not-a-numbers and infinities wherever no token lies.

    Behind each block's heads lies one of somebody else's. ``is_full``: the longest sequence grows to the end
    of its last block and of the table.
    """
    counts = [-(-length // block) for length in lengths]
    if is_full:
        longest = lengths.index(max(lengths))
        lengths = [*lengths[:longest], counts[longest] * block, *lengths[longest + 1 :]]
    free = torch.randperm(sum(counts) + 2).tolist()
    # Past a sequence's blocks the table names ones that are not its own.
    table = torch.full((len(lengths), max(max(counts), 1) + 1), free.pop())
    whole = torch.zeros(2, sum(counts) + 2, kv_heads + 1, block, kv_row_size(size, dtype)).to(dtype)
    keys, values, scales = open_kv_cache(whole)
    bad = torch.tensor([float("nan"), float("inf")]).repeat_interleave(block * size // 2).view(block, size)
    for part, part_scales in ((keys, scales and scales.keys), (values, scales and scales.values)):
        if part_scales is None:
            part[:] = bad.to(dtype)
        else:
            part_scales[:] = float("nan")
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        place = torch.arange(length)
        where = (table[row, place // block], slice(kv_heads), place % block)
        for part, part_scales in ((keys, scales and scales.keys), (values, scales and scales.values)):
            x = torch.randn(length, kv_heads, size)
            if part_scales is None:
                part[where] = x.to(dtype)
            else:
                part[where], part_scales[where] = quantize_kv(x, dtype)
    keys, values, scales = open_kv_cache(whole.to(device)[:, :, :kv_heads])
    columns = table.shape[1] - is_full
    return keys, values, table.to(device)[:, :columns], torch.tensor(lengths, device=device), scales


def rows(count: int, heads: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    """[count, heads, size], rows of something wider."""
    wide = torch.randn(count, heads * size + 16, device=device).to(dtype)
    return wide[:, : heads * size].unflatten(1, (heads, size))


def bound_of(dtype: torch.dtype, cache: torch.dtype | None) -> dict[str, float]:
    """For ``assert_near``: of attention, whose weights are rounded to what a GPU multiplies in."""
    if dtype == torch.bfloat16 and cache == torch.int8:
        return {"rms": 4e-3, "largest": 9e-3}  # a weight is rounded together with its value's scale
    is_narrow = dtype == torch.bfloat16 or cache == torch.float8_e4m3fn
    return {"rms": 3e-3, "largest": 9e-3} if is_narrow else {}
