"""Decode attention in Triton equals its float32 reference, whatever the unused slots hold."""

from typing import Any

import pytest
import torch

from quire_kernels.attention import split_kv_attention_triton
from quire_kernels.attention.paged_decode_attention import paged_decode_attention_reference
from quire_kernels.attention.paged_decode_attention_triton import paged_decode_attention_triton
from quire_kernels.attention.split_kv_attention_triton import decode_splits
from quire_kernels.launch_config import compute_capability
from tests.kernels.gpu.attention.paged_caches import CACHES, DTYPES, bound_of, paged_kv_cache, rows
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.strided_tensors import is_surrounding_untouched, output_in_wider_tensor
from tests.kernels.gpu.tolerances import assert_near

FACTORS: dict[str, Any] = {
    "lengths": [[1], [5, 257, 0, 1], [123, 64], [16, 33, 100]],  # length 0: padding
    "kv_heads": [1, 2],
    "group": [4, 3, 1, 8, 24],
    "size": [64, 80, 96, 128, 256],
    "block": [16, 64],
    "dtype": DTYPES,
    "cache": CACHES,
    "splits": [1, 2, 8, 32],
    "tile": [32, 16, 64],
    "more": [{}, {"window": 1}, {"window": 70}, {"softcap": 2.0}, {"window": 17, "softcap": 1.0}],
    "is_full": [False, True],
}


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_it_equals_its_reference(case: dict[str, Any], device: str) -> None:
    dtype, cache, heads = case["dtype"], case["cache"], case["kv_heads"] * case["group"]
    lengths, kv_heads, size, block = (case[name] for name in ("lengths", "kv_heads", "size", "block"))
    kv = paged_kv_cache(lengths, kv_heads, size, block, cache or dtype, device, is_full=case["is_full"])
    q = rows(len(lengths), heads, size, dtype, device)
    whole, out = output_in_wider_tensor(q, -2)
    arguments = (q, kv, size**-0.5)
    expected = paged_decode_attention_reference(*arguments, **case["more"])
    given = paged_decode_attention_triton(
        *arguments, **case["more"], splits=case["splits"], tile=case["tile"], out=out
    )
    assert given is out and is_surrounding_untouched(whole, -2)
    assert_near(out, expected, **bound_of(dtype, cache))


@pytest.mark.parametrize("splits", [1, 4])
def test_nan_is_propagated_within_its_sequence_only(splits: int, device: str) -> None:
    kv = paged_kv_cache([40, 40], 1, 64, 16, torch.float32, device)
    kv.cache.keys[kv.block_table[0, 1], 0, 3, 5] = float("nan")
    q = torch.randn(2, 2, 64, device=device)
    given = paged_decode_attention_triton(q, kv, 0.1, splits=splits, tile=16)
    assert given[0].isnan().all() and given[1].isfinite().all()


def test_splits_fill_the_gpu_and_never_exceed_the_tiles_and_many_sequences_have_some() -> None:
    assert [decode_splits(batch, 8, 1 << 20, 264, 64) for batch in (1, 2, 4, 8, 32, 256)] == [
        32,
        16,
        8,
        4,
        4,
        4,
    ]
    assert [decode_splits(256, 8, longest, 264, 64) for longest in (255, 256, 600, 1024)] == [1, 1, 2, 4]
    assert decode_splits(1, 8, 100, 264, 64) == 2 and decode_splits(0, 8, 0, 264, 64) == 1


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    kv = paged_kv_cache([5], 2, 64, 16, torch.float32, device)
    with pytest.raises(ValueError, match="do not fit"):
        paged_decode_attention_triton(torch.randn(1, 3, 64, device=device), kv, 1.0)
    with pytest.raises(ValueError, match="power of two up to 32: 3"):
        paged_decode_attention_triton(torch.randn(1, 4, 64, device=device), kv, 1.0, splits=3)


def test_tuned_configs_are_used(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    seen: list[tuple[int, int]] = []

    def noted(sequences: int, groups: int, longest: int, places: int, tile: int) -> int:
        seen.append((places, tile))
        return 1

    kv = paged_kv_cache([20, 7], 1, 64, 16, torch.float32, device)
    q = torch.randn(2, 2, 64, device=device)
    arguments = (q, kv, 0.1)
    expected = paged_decode_attention_reference(*arguments)
    monkeypatch.setattr(split_kv_attention_triton, "decode_splits", noted)
    for table_of_tuning in ({}, {(compute_capability(q.device), 2, 64, "float32"): (32, 2, 2, 5)}):
        monkeypatch.setattr(split_kv_attention_triton, "DECODE", table_of_tuning)
        assert_near(paged_decode_attention_triton(*arguments), expected)
    paged_decode_attention_triton(*arguments, tile=16)
    (own, own_tile), (tuned, tile), (asked, asked_tile) = seen
    assert tuned * 2 == own * 5 and asked == tuned
    assert (own_tile, tile, asked_tile) == (64, 32, 16)
