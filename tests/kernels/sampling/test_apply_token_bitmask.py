"""Token bitmasks, by the CPU kernel and by torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_kernels.sampling.apply_token_bitmask import apply_token_bitmask, apply_token_bitmask_reference

pytestmark = pytest.mark.usefixtures("each_isa")


@given(st.integers(1, 140), st.lists(st.integers(-1, 5), unique=True, max_size=6), st.integers(0, 2**20))
def test_masked_tokens_get_minus_infinity_and_nothing_else_changes(
    vocab: int, positions: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, vocab, generator=generator)
    allowed = torch.rand(len(positions), vocab, generator=generator) < torch.tensor([[0.5]])
    words = -(-vocab // 32)
    bits = torch.nn.functional.pad(allowed.long(), (0, 32 * words - vocab)).view(-1, words, 32)
    masks = (bits << torch.arange(32)).sum(-1).to(torch.int32)
    expected = logits.clone()
    for row, position in zip(allowed, positions, strict=True):
        if position >= 0:
            expected[position, ~row] = float("-inf")
    before, places = logits.clone(), torch.tensor(positions, dtype=torch.int64)
    for ours in (apply_token_bitmask, apply_token_bitmask_reference):
        assert torch.equal(ours(logits, masks, places), expected)
        assert torch.equal(logits, before)
        other = torch.zeros_like(logits)
        assert ours(logits, masks, places, out=other) is other and torch.equal(other, expected)
    assert apply_token_bitmask(logits, masks, places, out=logits) is logits
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("view", ["every second row", "half of each row"])
def test_non_contiguous_logits_are_masked_by_torch(view: str) -> None:
    whole = torch.randn(4, 64)
    logits = whole[::2] if view == "every second row" else whole[:2, :32]
    masks = torch.zeros(1, logits.shape[1] // 32, dtype=torch.int32)
    rest = whole[1::2].clone() if view == "every second row" else whole[:, 32:].clone()
    apply_token_bitmask(logits, masks, torch.tensor([1]), out=logits)
    assert logits[1].isinf().all() and logits[0].isfinite().all()
    assert torch.equal(whole[1::2] if view == "every second row" else whole[:, 32:], rest)
