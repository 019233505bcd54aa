"""Prefill attention in Triton equals its float32 reference."""

from typing import Any

import pytest
import torch

from quire_kernels.attention import paged_prefill_attention_triton as launcher
from quire_kernels.attention.paged_prefill_attention import paged_prefill_attention_reference
from quire_kernels.attention.paged_prefill_attention_triton import (
    Tiling,
    paged_prefill_attention_triton,
    prefill_tiling,
)
from quire_kernels.launch_config import compute_capability
from tests.kernels.gpu.attention.paged_caches import CACHES, DTYPES, bound_of, paged_kv_cache, rows
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.strided_tensors import is_surrounding_untouched, output_in_wider_tensor
from tests.kernels.gpu.tolerances import assert_near

FACTORS: dict[str, Any] = {
    # (tokens of the chunk, tokens up to its end) of each sequence
    "chunks": [
        [(5, 5), (30, 257), (1, 1)],
        [(123, 123)],
        [(59, 123), (0, 0), (64, 64)],
        [(1, 257), (1, 16), (17, 17)],
        [(257, 257)],
    ],
    "kv_heads": [1, 2],
    "group": [4, 3, 1, 8],
    "size": [64, 80, 96, 128, 256],
    "block": [16, 64],
    "dtype": DTYPES,
    "cache": CACHES,
    "tiling": [Tiling(64, 64, 4, 2), Tiling(32, 32, 4, 2), Tiling(128, 64, 8, 2), Tiling(64, 16, 4, 2)],
    "more": [{}, {"window": 1}, {"window": 70}, {"softcap": 2.0}, {"window": 17, "softcap": 1.0}],
    "is_full": [False, True],
}


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_it_equals_its_reference(case: dict[str, Any], device: str) -> None:
    dtype, cache, heads = case["dtype"], case["cache"], case["kv_heads"] * case["group"]
    kv_heads, size, block = (case[name] for name in ("kv_heads", "size", "block"))
    new, lengths = (list(side) for side in zip(*case["chunks"], strict=True))
    kv = paged_kv_cache(lengths, kv_heads, size, block, cache or dtype, device, is_full=case["is_full"])
    bounds = torch.tensor([0, *new], device=device).cumsum(0)
    q = rows(sum(new), heads, size, dtype, device)
    whole, out = output_in_wider_tensor(q, -2)
    arguments = (q, kv, bounds, size**-0.5)
    expected = paged_prefill_attention_reference(*arguments, **case["more"])
    paged_prefill_attention_triton(*arguments, **case["more"], tiling=case["tiling"], out=out)
    assert is_surrounding_untouched(whole, -2)
    assert_near(out, expected, **bound_of(dtype, cache))


def test_nothing_but_the_chunks_tokens_is_written(device: str) -> None:
    kv = paged_kv_cache([20, 7], 1, 64, 16, torch.float32, device)
    q, out = torch.randn(12, 2, 64, device=device), torch.full((12, 2, 64), 9.0, device=device)
    bounds = torch.tensor([0, 6, 10], device=device)  # the last two tokens belong to no chunk
    given = paged_prefill_attention_triton(q, kv, bounds, 0.1, out=out)
    assert (out[10:] == 9).all()
    expected = paged_prefill_attention_reference(q[:10], kv, bounds, 0.1)
    assert_near(given[:10], expected)


def test_nan_is_propagated_within_its_sequence_only(device: str) -> None:
    kv = paged_kv_cache([40, 40], 1, 64, 16, torch.float32, device)
    kv.cache.keys[kv.block_table[0, 1], 0, 3, 5] = float("nan")  # token 19
    q, bounds = torch.randn(70, 2, 64, device=device), torch.tensor([0, 35, 70], device=device)
    given = paged_prefill_attention_triton(q, kv, bounds, 0.1)
    assert given[14:35].isnan().all() and given[:14].isfinite().all() and given[35:].isfinite().all()


def test_longer_chunks_get_more_rows_and_wide_heads_fewer_keys() -> None:
    assert prefill_tiling(128, 64, 2).rows < prefill_tiling(128, 65, 2).rows
    assert prefill_tiling(256, 512, 2).tile < prefill_tiling(128, 512, 2).tile


def test_tuned_configs_are_used(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    kv = paged_kv_cache([20, 7], 1, 64, 16, torch.float32, device)
    q, bounds = torch.randn(10, 2, 64, device=device), torch.tensor([0, 6, 10], device=device)
    arguments = (q, kv, bounds, 0.1)
    key = (compute_capability(q.device), 64, "float32", False)
    monkeypatch.setattr(launcher, "PREFILL", {key: (32, 16, 4, 2)})
    monkeypatch.setattr(launcher, "prefill_tiling", pytest.fail)
    expected = paged_prefill_attention_reference(*arguments)
    assert_near(paged_prefill_attention_triton(*arguments), expected)


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    kv = paged_kv_cache([5], 2, 64, 16, torch.float32, device)
    bounds = torch.tensor([0, 5], device=device)
    arguments = (kv, bounds)
    with pytest.raises(ValueError, match="do not fit"):
        paged_prefill_attention_triton(torch.randn(5, 3, 64, device=device), *arguments, 1.0)
    with pytest.raises(ValueError, match="scale must be positive"):
        paged_prefill_attention_triton(torch.randn(5, 4, 64, device=device), *arguments, 0.0)
    with pytest.raises(ValueError, match="128 query heads"):
        paged_prefill_attention_triton(torch.randn(5, 256, 64, device=device), *arguments, 1.0)
