"""Penalties and grammars in Triton give the very logits of their references, whatever the rows look like."""

import pytest
import torch
from torch import Tensor

from quire_kernels.penalties import apply_penalties_reference
from quire_kernels.penalties_triton import apply_penalties_triton
from quire_kernels.token_bitmask import apply_token_bitmask_reference
from quire_kernels.token_bitmask_triton import apply_token_bitmask_triton

# Of seven positions: nothing asked for, each kind alone, all together, and a context that is empty.
REPETITION = [1.0, 1.3, 1.0, 1.0, 0.7, 1.1, 10.0]
PRESENCE = [0.0, 0.0, 1.5, 0.0, -2.0, 0.1, 2.0]
FREQUENCY = [0.0, 0.0, 0.0, 0.3, 1.9, 0.1, 2.0]
ROWS = [2, 0, 1, 2, 2, 0, 1]  # some rows ask for several positions, as drafts do
PROMPTS = [9, 1, 0, 30, 9, 40, 0]
LENGTHS = [40, 1, 57, 60, 41, 40, 0]


def settings(device: str) -> tuple[Tensor, ...]:
    """rows, prompt_lengths, lengths, repetition, presence, frequency."""
    whole = [torch.tensor(values, device=device) for values in (ROWS, PROMPTS, LENGTHS)]
    parts = [torch.tensor(values, device=device, dtype=torch.float64) for values in (PRESENCE, FREQUENCY)]
    return *whole, torch.tensor(REPETITION, device=device), *parts


@pytest.mark.parametrize("vocab_size", [1, 5, 123, 1031, 2048])
def test_the_context_of_each_position_is_penalised(vocab_size: int, device: str) -> None:
    logits = torch.randn(7, vocab_size + 3, device=device)[:, 3:] * 5
    logits[:, ::3] = logits[:, ::3].abs()
    logits[4, vocab_size // 2] = float("-inf")
    logits[5, vocab_size // 3] = float("nan")
    tokens = torch.randint(-2, min(vocab_size + 2, 90), (3, 64), device=device)
    given = settings(device)
    expected = apply_penalties_reference(logits, tokens, *given)
    before = logits.clone()
    actual = apply_penalties_triton(logits, tokens, *given)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    assert vocab_size < 100 or not torch.equal(actual[1:6].nan_to_num(), logits[1:6].nan_to_num())


def test_in_place_and_the_table_is_empty_again(device: str) -> None:
    wide = torch.randn(7, 2000, device=device)
    logits, counts = wide[:, 8:1508], torch.zeros(7, 1500, dtype=torch.int32, device=device)
    tokens, given = torch.randint(0, 1500, (3, 64), device=device), settings(device)
    for _ in range(2):
        expected = apply_penalties_reference(logits, tokens, *given)
        around = wide.clone()
        assert apply_penalties_triton(logits, tokens, *given, out=logits, counts=counts) is logits
        assert torch.equal(logits, expected) and not counts.any()
        around[:, 8:1508] = expected
        assert torch.equal(wide, around)


def test_tables_that_do_not_fit_are_refused(device: str) -> None:
    logits, tokens = torch.randn(7, 50, device=device), torch.zeros(3, 64, dtype=torch.int64, device=device)
    *others, presence, frequency = settings(device)
    with pytest.raises(ValueError, match="presence and frequency float64"):
        apply_penalties_triton(logits, tokens, *others, presence.float(), frequency)
    with pytest.raises(ValueError, match=r"counts must be \[7, 50\]"):
        apply_penalties_triton(
            logits, tokens, *others, presence, frequency, counts=torch.zeros(7, 49, device=device)
        )
    with pytest.raises(ValueError, match="logits must be"):
        apply_penalties_triton(logits.T.contiguous().T, tokens, *others, presence, frequency)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 5, 32, 123, 257, 4100])
def test_what_a_mask_forbids_is_minus_infinity(vocab_size: int, dtype: torch.dtype, device: str) -> None:
    wide = torch.randn(5, vocab_size + 3, device=device).to(dtype)
    logits = wide[:, 3:]
    logits[1, vocab_size // 2] = float("nan")
    words = torch.randint(-(1 << 31), 1 << 31, (4, -(-vocab_size // 32) + 1), device=device)
    bitmask = words.to(torch.int32)[:, :-1]
    bitmask[0], bitmask[2] = 0, -1
    positions = torch.tensor([3, 1, 4, -1], device=device)
    expected = apply_token_bitmask_reference(logits, bitmask, positions)
    before = wide.clone()
    given = apply_token_bitmask_triton(logits, bitmask, positions)
    torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(wide.nan_to_num(), before.nan_to_num())
    assert (given[3] == float("-inf")).all() and torch.equal(given[[0, 2, 4]], logits[[0, 2, 4]])
    assert apply_token_bitmask_triton(logits, bitmask, positions, out=logits) is logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(wide[:, :3], before[:, :3])


def test_a_mask_that_is_too_short_is_refused(device: str) -> None:
    logits, positions = torch.randn(2, 65, device=device), torch.tensor([0], device=device)
    with pytest.raises(ValueError, match=r"bitmask must be \[1, 3\]"):
        apply_token_bitmask_triton(logits, torch.zeros(1, 2, dtype=torch.int32, device=device), positions)
