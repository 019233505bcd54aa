"""The split kernel gives what one sequence at a time in float32 gives, whatever lies around the tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.kv_quantization import KVScales, is_quantized_kv, kv_row_size, open_kv_cache, quantize_kv
from quire_kernels.paged_decode_attention import paged_decode_attention_reference
from quire_kernels.paged_decode_attention_triton import decode_splits, paged_decode_attention_triton
from tests.kernels.gpu.closeness import assert_near

# lengths, KV heads, group, head size, block size, dtype, cache, splits, tile, more
CASES: list[Any] = [
    ([1], 2, 4, 64, 16, torch.bfloat16, None, 1, 32, {}),
    ([5, 257, 1], 1, 3, 64, 64, torch.bfloat16, None, 8, 32, {}),
    ([123, 16], 2, 1, 80, 16, torch.float32, None, 2, 16, {}),
    ([64, 123], 1, 8, 128, 64, torch.bfloat16, None, 4, 64, {"window": 70}),
    ([257, 5], 1, 4, 96, 16, torch.float16, None, 32, 16, {"softcap": 2.0}),
    ([33, 100], 1, 2, 256, 64, torch.bfloat16, None, 2, 32, {"window": 17, "softcap": 1.0}),
    ([130, 7, 1], 2, 4, 64, 16, torch.float32, None, 4, 16, {"window": 1}),
    ([100, 257], 1, 4, 64, 16, torch.bfloat16, torch.float8_e4m3fn, 4, 32, {}),
    ([123, 5], 2, 3, 80, 64, torch.bfloat16, torch.int8, 1, 32, {"window": 50}),
    ([65, 1], 1, 8, 128, 64, torch.float32, torch.int8, 2, 64, {}),
    ([17, 90], 1, 24, 64, 16, torch.float32, torch.float8_e4m3fn, 2, 32, {}),
]
Paged = tuple[Tensor, Tensor, Tensor, Tensor, KVScales | None]


def paged(lengths: list[int], kv_heads: int, size: int, block: int, dtype: torch.dtype, device: str) -> Paged:
    """(keys, values, table, lengths, scales); not-a-numbers and infinities wherever no token lies."""
    counts = [-(-length // block) for length in lengths]
    free = torch.randperm(sum(counts) + 2).tolist()
    # Past a sequence's blocks the table names ones that are not its own.
    table = torch.full((len(lengths), max(max(counts), 1) + 1), free.pop())
    whole = torch.zeros(2, sum(counts) + 2, kv_heads, block, kv_row_size(size, dtype)).to(dtype)
    keys, values, scales = open_kv_cache(whole)
    bad = torch.tensor([float("nan"), float("inf")]).repeat_interleave(block * size // 2).view(block, size)
    for part, part_scales in ((keys, scales and scales.keys), (values, scales and scales.values)):
        if part_scales is None:
            part[:] = bad.to(dtype)
        else:
            part_scales[:] = float("nan")
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        for place in range(length):
            where = (table[row, place // block], slice(None), place % block)
            for part, part_scales in ((keys, scales and scales.keys), (values, scales and scales.values)):
                x = torch.randn(kv_heads, size)
                if part_scales is None:
                    part[where] = x.to(dtype)
                else:
                    part[where], part_scales[where] = quantize_kv(x, dtype)
    on_device = whole.to(device)
    keys, values, scales = open_kv_cache(on_device)
    return keys, values, table.to(device), torch.tensor(lengths, device=device), scales


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "size", "block", "dtype", "cache", "splits", "tile", "more"), CASES
)
def test_it_equals_its_reference(
    lengths: list[int], kv_heads: int, group: int, size: int, block: int, dtype: torch.dtype,
    cache: torch.dtype | None, splits: int, tile: int, more: dict[str, Any], device: str,
) -> None:  # fmt: skip
    kind = cache or dtype
    keys, values, table, seq_lens, scales = paged(lengths, kv_heads, size, block, kind, device)
    heads = kv_heads * group
    q = torch.randn(len(lengths), heads * size + 16, device=device).to(dtype)[:, : heads * size]
    q = q.unflatten(1, (heads, size))
    arguments = (q, keys, values, table, seq_lens, size**-0.5)
    expected = paged_decode_attention_reference(*arguments, **more, scales=scales)
    given = paged_decode_attention_triton(*arguments, **more, scales=scales, splits=splits, tile=tile)
    narrow = is_quantized_kv(kind) and kind == torch.float8_e4m3fn
    bound = 3e-3 if dtype == torch.bfloat16 or narrow else None
    assert_near(given, expected, rms=bound, largest=None if bound is None else 3 * bound)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_padding_row_gives_zeros_and_out_may_be_part_of_more(splits: int, device: str) -> None:
    keys, values, table, seq_lens, _ = paged([20, 0, 3], 1, 64, 16, torch.float32, device)
    q, out = torch.randn(3, 2, 64, device=device), torch.full((3, 3, 64), 9.0, device=device)
    given = paged_decode_attention_triton(
        q, keys, values, table, seq_lens, 0.1, splits=splits, tile=16, out=out[:, :2]
    )
    assert (given[1] == 0).all() and (out[:, 2] == 9).all()
    rows = torch.tensor([0, 2], device=device)
    some = (q[rows], keys, values, table[rows], seq_lens[rows], 0.1)
    assert_near(given[rows], paged_decode_attention_reference(*some))


@pytest.mark.parametrize("splits", [1, 4])
def test_a_number_that_is_none_is_not_hidden_and_stays_in_its_sequence(splits: int, device: str) -> None:
    keys, values, table, seq_lens, _ = paged([40, 40], 1, 64, 16, torch.float32, device)
    keys[table[0, 1], 0, 3, 5] = float("nan")
    q = torch.randn(2, 2, 64, device=device)
    given = paged_decode_attention_triton(q, keys, values, table, seq_lens, 0.1, splits=splits, tile=16)
    assert given[0].isnan().all() and given[1].isfinite().all()


def test_parts_fill_the_gpu_and_are_never_more_than_tiles() -> None:
    assert [decode_splits(batch, 8, 1 << 20, 132, 64) for batch in (1, 2, 4, 8, 32, 256)] == [
        32,
        16,
        8,
        4,
        1,
        1,
    ]
    assert decode_splits(1, 8, 100, 132, 64) == 2 and decode_splits(0, 8, 0, 132, 64) == 1


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    keys, values, table, seq_lens, _ = paged([5], 2, 64, 16, torch.float32, device)
    with pytest.raises(ValueError, match="do not fit"):
        paged_decode_attention_triton(
            torch.randn(1, 3, 64, device=device), keys, values, table, seq_lens, 1.0
        )
    with pytest.raises(ValueError, match="power of two up to 32: 3"):
        paged_decode_attention_triton(
            torch.randn(1, 4, 64, device=device), keys, values, table, seq_lens, 1.0, splits=3
        )
