"""Quantized KV caches: what is read back, and attention over them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels import PagedKVCache, kv_row_size, open_kv_cache, rope_kv_write
from quire_kernels.attention.paged_decode_attention import (
    paged_decode_attention,
    paged_decode_attention_reference,
)
from quire_kernels.attention.paged_prefill_attention import (
    paged_prefill_attention,
    paged_prefill_attention_reference,
)
from quire_kernels.attention.rope_kv_write import rope_kv_write_reference
from quire_kernels.paged_kv_cache import read_kv
from quire_kernels.quantization.row_quantization import quantize_rows
from tests.kernels.attention.paged_batches import BLOCK, HEADS, KV_HEADS, SIZE, VARIANTS, paged_kv_cache

INT8, FP8 = torch.int8, torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])


def allocated(num_blocks: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(2, num_blocks, KV_HEADS, BLOCK, kv_row_size(SIZE, dtype), dtype=dtype)


def quantized_and_float(lengths: list[int], dtype: torch.dtype) -> tuple[Tensor, PagedKVCache]:
    """A quantized cache, and the float cache that it was quantized from."""
    kv = paged_kv_cache(lengths)
    cache = allocated(kv.cache.keys.shape[0], dtype)
    stored = open_kv_cache(cache)
    assert stored.scales is not None
    for data, scales, source in (
        (stored.keys, stored.scales.keys, kv.cache.keys),
        (stored.values, stored.scales.values, kv.cache.values),
    ):
        rows, row_scales = quantize_rows(source, dtype)
        data.copy_(rows)
        scales.copy_(row_scales)
    return cache, kv


@DTYPES
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e6])
def test_dequantized_values_are_within_half_a_quantization_step(dtype: torch.dtype, size: float) -> None:
    x = torch.randn(500, SIZE) * size
    stored, scales = quantize_rows(x, dtype)
    error = (stored.float() * scales[:, None] - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    if dtype == INT8:
        assert bool((error <= largest / 254 * 1.0001).all())
    else:  # half a step of three bits; for subnormals, half of the smallest number, 2^-9 of 448
        assert bool((error <= torch.maximum(x.abs() / 16, largest / 448 / 1024) * 1.0001).all())
    assert stored.dtype == dtype
    torch.testing.assert_close((stored.float() * scales[:, None]).abs().amax(-1, keepdim=True), largest)


@DTYPES
def test_zeros_stay_zeros_and_non_finite_values_read_back_as_nan(dtype: torch.dtype) -> None:
    x = torch.zeros(4, SIZE)
    x[1, 3], x[2, 3], x[3, 3] = float("nan"), float("inf"), float("-inf")
    for scale in (None, torch.tensor(0.1)):
        stored, scales = quantize_rows(x, dtype, scale)
        read = stored.float() * scales[:, None]
        assert torch.equal(read[0], x[0])
        assert bool(read[1:].isnan().any(-1).all())


def test_a_fixed_scale_saturates() -> None:
    x = torch.tensor([[1.0, 1000.0, -1e9, 0.5]])
    stored, scales = quantize_rows(x, FP8, torch.tensor(0.5))
    assert (stored.float() * scales[:, None]).tolist() == [[1.0, 224.0, -224.0, 0.5]]


@DTYPES
@pytest.mark.parametrize("fixed", [None, (torch.tensor(0.01), torch.tensor(0.02))], ids=["own", "fixed"])
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
def test_the_write_equals_its_reference_and_touches_no_other_slot(
    dtype: torch.dtype, fixed: tuple[Tensor, Tensor] | None, model_dtype: torch.dtype
) -> None:
    qkv = torch.randn(5, (HEADS + 2 * KV_HEADS) * SIZE, dtype=model_dtype)
    angles, slots = torch.rand(5, SIZE // 2), torch.tensor([7, 8, 39, 0, 1])
    ours, theirs = allocated(10, dtype), allocated(10, dtype)
    queries = []
    for write, cache in ((rope_kv_write_reference, theirs), (rope_kv_write, ours)):
        arguments = () if write is rope_kv_write_reference else (None,)
        opened = open_kv_cache(cache, fixed)
        queries.append(write(qkv, angles.cos(), angles.sin(), *arguments, slots, opened))
    torch.testing.assert_close(*queries)
    our, their = map(open_kv_cache, (ours, theirs))
    blocks = torch.arange(10)
    assert torch.equal(our.values.view(torch.uint8), their.values.view(torch.uint8))
    torch.testing.assert_close(our.scales.values, their.scales.values)
    step = (
        0.1 * read_kv(their.keys, their.scales.keys, blocks).abs().max()
    )  # a rotation may round to the next step
    torch.testing.assert_close(
        read_kv(our.keys, our.scales.keys, blocks),
        read_kv(their.keys, their.scales.keys, blocks),
        atol=float(step),
        rtol=0,
    )
    assert int((our.scales.keys != 0).sum()) == len(slots) * KV_HEADS
    if fixed is not None and dtype == FP8:
        assert set(our.scales.keys.unique().tolist()) == {0.0, fixed[0].item()}


@DTYPES
def test_tokens_written_one_by_one_are_stored_as_if_written_together(dtype: torch.dtype) -> None:
    qkv = torch.randn(9, (HEADS + 2 * KV_HEADS) * SIZE)
    angles, slots = torch.rand(9, SIZE // 2), torch.randperm(12)[:9]
    together, alone = allocated(3, dtype), allocated(3, dtype)
    for cache, parts in ((together, [slice(0, 9)]), (alone, [slice(n, n + 1) for n in range(9)])):
        for part in parts:
            cos, sin = angles[part].cos(), angles[part].sin()
            rope_kv_write(qkv[part], cos, sin, None, slots[part], open_kv_cache(cache))
    assert torch.equal(together.view(torch.uint8), alone.view(torch.uint8))


@DTYPES
@pytest.mark.parametrize("more", ({}, *VARIANTS), ids=str)
def test_attention_equals_its_reference_on_the_same_bytes(dtype: torch.dtype, more: dict[str, Any]) -> None:
    cache, source = quantized_and_float([5, 1, 17, 8], dtype)
    kv = replace(source, cache=open_kv_cache(cache))
    q = torch.randn(4, HEADS, SIZE)
    decoded = [
        attend(q, kv, 0.3, **more) for attend in (paged_decode_attention, paged_decode_attention_reference)
    ]
    torch.testing.assert_close(*decoded)
    chunks = torch.tensor([0, 2, 3, 9, 12])  # the last 2, 1, 6 and 3 tokens
    q = torch.randn(12, HEADS, SIZE)
    prefilled = [
        attend(q, kv, chunks, 0.3, **more)
        for attend in (paged_prefill_attention, paged_prefill_attention_reference)
    ]
    torch.testing.assert_close(*prefilled)


@pytest.mark.parametrize(("dtype", "bound"), [(INT8, 0.01), (FP8, 0.04)], ids=["int8", "fp8"])
def test_attention_is_close_to_that_over_the_float_cache(dtype: torch.dtype, bound: float) -> None:
    cache, source = quantized_and_float([5, 30, 170, 80], dtype)
    kv = replace(source, cache=open_kv_cache(cache))
    q = torch.randn(4, HEADS, SIZE)
    result = paged_decode_attention(q, kv, SIZE**-0.5)
    exact = paged_decode_attention_reference(q, source, SIZE**-0.5)
    assert float((result - exact).norm() / exact.norm()) < bound
    assert not torch.equal(result, exact)


@DTYPES
def test_moved_blocks_keep_their_scales(dtype: torch.dtype) -> None:
    cache, source = quantized_and_float([5, 30], dtype)
    q = torch.randn(2, HEADS, SIZE)
    order = torch.randperm(cache.shape[1])
    moved = torch.empty_like(cache)
    moved[:, order] = cache
    answers = []
    for place, blocks in ((cache, source.block_table), (moved, order[source.block_table])):
        kv = PagedKVCache(open_kv_cache(place), blocks, source.seq_lens)
        answers.append(paged_decode_attention(q, kv, 0.3))
    assert torch.equal(*answers)
