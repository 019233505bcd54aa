from typing import Any

import pytest
import torch

from quire_kernels.attention.paged_decode_attention import (
    decode_gather,
    paged_decode_attention,
    paged_decode_attention_reference,
)
from tests.kernels.attention.paged_batches import BLOCK, HEADS, KV_HEADS, SIZE, VARIANTS, paged_kv_cache


@pytest.mark.parametrize("lengths", [[1], [4], [5, 1, 17, 8], [3] * 9])
@pytest.mark.parametrize("limit", [1, 4, 1024])
def test_it_equals_its_reference_however_the_sequences_are_grouped(lengths: list[int], limit: int) -> None:
    kv = paged_kv_cache(lengths)
    q = torch.randn(len(lengths), HEADS, SIZE)
    parts = decode_gather(kv.block_table, kv.seq_lens, KV_HEADS, BLOCK, max_blocks=limit)
    result = paged_decode_attention(q, kv, 0.3, gather=lambda: parts)
    expected = paged_decode_attention_reference(q, kv, 0.3)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(paged_decode_attention(q, kv, 0.3), expected)
    assert [part.first for part in parts[1:]] == [part.last for part in parts[:-1]]
    assert all(part.index.numel() <= limit * KV_HEADS or part.last - part.first == 1 for part in parts)


@pytest.mark.parametrize("more", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_and_caps_equal_the_reference(more: dict[str, Any], dtype: torch.dtype) -> None:
    kv = paged_kv_cache([5, 1, 17, 8, 31], dtype)
    q = torch.randn(5, HEADS, SIZE).to(dtype)
    result = paged_decode_attention(q, kv, 0.3, **more)
    expected = paged_decode_attention_reference(q, kv, 0.3, **more)
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(result, expected, **tolerance)


def test_blocks_before_the_window_are_not_copied() -> None:
    kv = paged_kv_cache([30, 9])
    (part,) = decode_gather(kv.block_table, kv.seq_lens, KV_HEADS, BLOCK, window=2 * BLOCK)
    assert part.index.numel() == 2 * KV_HEADS * 3


def test_bfloat16_stays_close_to_the_reference() -> None:
    kv = paged_kv_cache([9, 30], torch.bfloat16)
    q = torch.randn(2, HEADS, SIZE).bfloat16()
    result = paged_decode_attention(q, kv, 0.3)
    expected = paged_decode_attention_reference(q, kv, 0.3)
    torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-2)


def test_a_sequence_reads_nothing_but_its_own_tokens() -> None:
    kv = paged_kv_cache([6, 11])
    q = torch.randn(2, HEADS, SIZE)
    before = paged_decode_attention(q, kv, 0.3)
    others = torch.ones(kv.cache.keys.shape[0], dtype=torch.bool)
    others[kv.block_table[0]] = False
    kv.cache.keys[others], kv.cache.values[others] = float("nan"), float("nan")
    after = paged_decode_attention(q, kv, 0.3)
    assert torch.equal(before[0], after[0]) and after[1].isnan().all()
