"""Penalties and grammar masks in Triton give exactly the logits of their references."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.sampling.apply_penalties import apply_penalties_reference
from quire_kernels.sampling.apply_penalties_triton import apply_penalties_triton
from quire_kernels.sampling.apply_token_bitmask import apply_token_bitmask_reference
from quire_kernels.sampling.apply_token_bitmask_triton import apply_token_bitmask_triton
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.strided_tensors import is_surrounding_untouched, output_in_wider_tensor, rows

# Of seven positions: nothing asked for, each kind alone, all together, and a context that is empty.
REPETITION = [1.0, 1.3, 1.0, 1.0, 0.7, 1.1, 10.0]
PRESENCE = [0.0, 0.0, 1.5, 0.0, -2.0, 0.1, 2.0]
FREQUENCY = [0.0, 0.0, 0.0, 0.3, 1.9, 0.1, 2.0]
ROWS = [2, 0, 1, 2, 2, 0, 1]  # some rows have several positions, as with draft tokens
PROMPTS = [9, 1, 0, 30, 9, 40, 0]
LENGTHS = [40, 1, 57, 60, 41, 40, 0]


def settings(device: str) -> tuple[Tensor, ...]:
    """rows, prompt_lengths, lengths, repetition, presence, frequency."""
    whole = [torch.tensor(values, device=device) for values in (ROWS, PROMPTS, LENGTHS)]
    parts = [torch.tensor(values, device=device, dtype=torch.float64) for values in (PRESENCE, FREQUENCY)]
    return *whole, torch.tensor(REPETITION, device=device), *parts


FACTORS: dict[str, Any] = {
    "vocab": [123, 1, 5, 257, 1031, 2048],
    "positions": [slice(0, 7), slice(5, 6), slice(0, 0)],
    "apart": [3, 0, 8],
    "width": [64, 61],  # of the token table
    "is_in_place": [False, True],
    "has_counts": [False, True],
}


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_penalties_apply_to_the_context_of_each_position(case: dict[str, Any], device: str) -> None:
    vocab_size, positions = case["vocab"], case["positions"]
    given = [values[positions] for values in settings(device)]
    logits = rows(7, vocab_size, torch.float32, case["apart"], device)
    logits[:, ::3] = logits[:, ::3].abs()
    logits[4, vocab_size // 2] = float("-inf")
    logits[5, vocab_size // 3] = float("nan")
    logits = logits[positions]
    tokens = torch.randint(-2, min(vocab_size + 2, 90), (3, 64), device=device)[:, : case["width"]]
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=device) if case["has_counts"] else None
    before, expected = logits.clone(), apply_penalties_reference(logits, tokens, *given)
    whole, out = output_in_wider_tensor(logits)
    if case["is_in_place"]:
        out = logits
    assert apply_penalties_triton(logits, tokens, *given, out=out, counts=counts) is out
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert is_surrounding_untouched(whole) and (counts is None or not counts.any())
    if not case["is_in_place"]:
        torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    assert vocab_size < 100 or not len(before) or not torch.equal(out.nan_to_num(), before.nan_to_num())


def test_the_table_is_empty_again_and_what_lies_around_is_surrounding_untouched(device: str) -> None:
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


MASKS: dict[str, Any] = {
    "vocab": [123, 1, 5, 32, 257, 4100],
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "positions": [[3, 1, 4, -1], [2], []],
    "apart": [3, 0],
    "is_in_place": [False, True],
}


@pytest.mark.parametrize("case", cases(MASKS), ids=str)
def test_masked_tokens_get_minus_infinity(case: dict[str, Any], device: str) -> None:
    vocab_size, masks = case["vocab"], len(case["positions"])
    logits = rows(5, vocab_size, case["dtype"], case["apart"], device)
    logits[1, vocab_size // 2] = float("nan")
    words = torch.randint(-(1 << 31), 1 << 31, (4, -(-vocab_size // 32) + 1), device=device)
    words[0], words[2] = 0, -1
    bitmask, positions = words.to(torch.int32)[:masks, :-1], torch.tensor(case["positions"], device=device)
    positions = positions.to(torch.int64)
    before, expected = logits.clone(), apply_token_bitmask_reference(logits, bitmask, positions)
    whole, out = output_in_wider_tensor(logits)
    if case["is_in_place"]:
        out = logits
    assert apply_token_bitmask_triton(logits, bitmask, positions, out=out) is out
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert is_surrounding_untouched(whole)
    assert not masks or (out[case["positions"][0]] == float("-inf")).all()
    free = [row for row in range(5) if row not in case["positions"]]
    torch.testing.assert_close(out[free], before[free], rtol=0, atol=0, equal_nan=True)


def test_a_mask_that_is_too_short_is_refused(device: str) -> None:
    logits, positions = torch.randn(2, 65, device=device), torch.tensor([0], device=device)
    with pytest.raises(ValueError, match=r"bitmask must be \[1, 3\]"):
        apply_token_bitmask_triton(logits, torch.zeros(1, 2, dtype=torch.int32, device=device), positions)
