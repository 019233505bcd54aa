from dataclasses import replace
from typing import Any

import pytest
import torch

from quire_kernels.attention.paged_prefill_attention import (
    are_whole_prompts,
    paged_prefill_attention,
    paged_prefill_attention_reference,
    whole_prompt_attention,
)
from quire_kernels.paged_kv_cache import KVCache, KVScales
from quire_kernels.quantization.row_quantization import quantize_rows
from tests.kernels.attention.paged_batches import HEADS, SIZE, VARIANTS, paged_kv_cache

SHAPES = {
    "one whole prompt": ([9], [9]),
    "the end of a prompt": ([9], [3]),
    "one token of a chunk": ([9, 4], [1, 4]),
    "a mixture": ([9, 16, 21, 2], [9, 5, 1, 2]),
}


@pytest.mark.parametrize("more", [{}, *VARIANTS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lengths", "chunks"), SHAPES.values(), ids=SHAPES)
def test_it_equals_its_reference(
    lengths: list[int], chunks: list[int], dtype: torch.dtype, more: dict[str, Any]
) -> None:
    kv = paged_kv_cache(lengths, dtype)
    bounds = torch.tensor([0, *chunks]).cumsum(0)
    q = torch.randn(sum(chunks), HEADS, SIZE).to(dtype)
    result = paged_prefill_attention(q, kv, bounds, 0.3, **more)
    expected = paged_prefill_attention_reference(q, kv, bounds, 0.3, **more)
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(result, expected, **tolerance)


def test_no_token_sees_a_later_one() -> None:
    kv = paged_kv_cache([8])
    q = torch.randn(8, HEADS, SIZE)
    bounds = torch.tensor([0, 8])
    before = paged_prefill_attention(q, kv, bounds, 0.3)
    kv.cache.keys[kv.block_table[0, 1]] += 1  # tokens 4 to 7
    after = paged_prefill_attention(q, kv, bounds, 0.3)
    assert torch.equal(before[:4], after[:4]) and not torch.equal(before[4:], after[4:])


def test_no_token_sees_beyond_its_window() -> None:
    kv = paged_kv_cache([12])
    q = torch.randn(12, HEADS, SIZE)
    bounds = torch.tensor([0, 12])
    before = paged_prefill_attention(q, kv, bounds, 0.3, window=5)
    kv.cache.keys[kv.block_table[0, 0]] += 1  # tokens 0 to 3, which token 8 and later ones do not see
    after = paged_prefill_attention(q, kv, bounds, 0.3, window=5)
    assert torch.equal(before[8:], after[8:]) and not torch.equal(before[7], after[7])


def quantized(cache: KVCache, dtype: torch.dtype) -> KVCache:
    (keys, key_scales), (values, value_scales) = (
        quantize_rows(each, dtype) for each in (cache.keys, cache.values)
    )
    return KVCache(keys, values, KVScales(key_scales, value_scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_whole_prompts_by_torch_attention_equal_the_reference(dtype: torch.dtype) -> None:
    kv = paged_kv_cache([9, 1, 16])
    q, out = torch.randn(26, HEADS, SIZE), torch.empty(26, HEADS, SIZE)
    if dtype == torch.int8:
        kv = replace(kv, cache=quantized(kv.cache, dtype))
    given = whole_prompt_attention(q, kv, kv.seq_lens.tolist(), 0.3, out)
    bounds = torch.tensor([0, 9, 10, 26])
    expected = paged_prefill_attention_reference(q, kv, bounds, 0.3)
    torch.testing.assert_close(given, expected)
    assert given is out


def test_torch_attention_takes_long_prompts_without_prefix_within_the_window() -> None:
    free = {"window": None, "softcap": None}
    assert are_whole_prompts([(512, 512), (2000, 2000)], **free)
    assert not are_whole_prompts([(512, 512), (2000, 2016)], **free)  # a cached prefix
    assert not are_whole_prompts([(512, 512), (511, 511)], **free)
    assert not are_whole_prompts([(600, 600)], window=599, softcap=None)
    assert are_whole_prompts([(600, 600)], window=600, softcap=None)
    assert not are_whole_prompts([(600, 600)], window=None, softcap=30.0)
