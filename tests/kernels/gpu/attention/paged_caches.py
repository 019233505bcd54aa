"""Paged KV caches whose unused slots hold NaN and infinity, for the attention tests."""

import torch
from torch import Tensor

from quire_kernels.paged_kv_cache import PagedKVCache, kv_row_size, open_kv_cache
from quire_kernels.quantization.row_quantization import quantize_rows

DTYPES = (torch.bfloat16, torch.float32, torch.float16)  # what the model computes in
CACHES = (None, torch.float8_e4m3fn, torch.int8)  # what the cache holds; None: the same


def paged_kv_cache(
    lengths: list[int], kv_heads: int, size: int, block: int, dtype: torch.dtype, device: str, *,
    is_full: bool = False,
) -> PagedKVCache:  # fmt: skip
    """Sequences of these lengths; NaN and infinity wherever no token is stored.

    The cache is a slice of a wider one, so that its blocks are not adjacent. ``is_full``: the longest
    sequence grows to the end of its last block and of the block table.
    """
    counts = [-(-length // block) for length in lengths]
    if is_full:
        longest = lengths.index(max(lengths))
        lengths = [*lengths[:longest], counts[longest] * block, *lengths[longest + 1 :]]
    free = torch.randperm(sum(counts) + 2).tolist()
    # Past a sequence's blocks the block table names a block of no sequence.
    table = torch.full((len(lengths), max(max(counts), 1) + 1), free.pop())
    whole = torch.zeros(2, sum(counts) + 2, kv_heads + 1, block, kv_row_size(size, dtype)).to(dtype)
    cache = open_kv_cache(whole)
    halves = cache.with_scales()
    bad = torch.tensor([float("nan"), float("inf")]).repeat_interleave(block * size // 2).view(block, size)
    for part, part_scales in halves:
        if part_scales is None:
            part[:] = bad.to(dtype)
        else:
            part_scales[:] = float("nan")
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        place = torch.arange(length)
        where = (table[row, place // block], slice(kv_heads), place % block)
        for part, part_scales in halves:
            x = torch.randn(length, kv_heads, size)
            if part_scales is None:
                part[where] = x.to(dtype)
            else:
                part[where], part_scales[where] = quantize_rows(x, dtype)
    cache = open_kv_cache(whole.to(device)[:, :, :kv_heads])
    columns = table.shape[1] - is_full
    return PagedKVCache(cache, table.to(device)[:, :columns], torch.tensor(lengths, device=device))


def rows(count: int, heads: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    """[count, heads, size], a slice of a wider tensor."""
    wide = torch.randn(count, heads * size + 16, device=device).to(dtype)
    return wide[:, : heads * size].unflatten(1, (heads, size))


def bound_of(dtype: torch.dtype, cache: torch.dtype | None) -> dict[str, float]:
    """Bounds for ``assert_near``: attention rounds its weights to the dtype that tensor cores multiply in."""
    if dtype == torch.bfloat16 and cache == torch.int8:
        return {"rms": 4e-3, "largest": 9e-3}  # a weight is rounded together with its value's scale
    is_narrow = dtype == torch.bfloat16 or cache == torch.float8_e4m3fn
    return {"rms": 3e-3, "largest": 9e-3} if is_narrow else {}
