"""Draws and cuts in Triton are the reference's, token by token."""

import pytest
import torch
from torch import Tensor

from quire_kernels.gumbel_sample import gumbel_noise, gumbel_sample_reference
from quire_kernels.gumbel_sample_triton import gumbel_sample_triton
from quire_kernels.topk_topp_threshold import topk_topp_threshold_reference
from quire_kernels.topk_topp_threshold_triton import topk_topp_threshold_triton

SEEDS = [1, -7, 3, 3, 1 << 62, 0, -1, (1 << 63) - 1]
POSITIONS = [0, 5, 9, 10, 7, 1 << 33, (1 << 32) - 1, 2]


def rows(values: list[float], device: str, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize(("vocab_size", "dtype", "cut"), [
    (1, torch.float32, False), (5, torch.float32, True), (123, torch.bfloat16, False),
    (1024, torch.float32, True), (2057, torch.float32, False), (4099, torch.float16, True),
])  # fmt: skip
def test_it_draws_the_very_tokens_of_the_reference(
    vocab_size: int, dtype: torch.dtype, cut: bool, device: str
) -> None:
    wide = torch.randn(8, vocab_size + 3, device=device).to(dtype)
    logits = wide[:, 3:]
    temperature = torch.rand(8, device=device) + 0.2
    seeds, positions = rows(SEEDS, device), rows(POSITIONS, device)
    threshold = torch.zeros(8, device=device) if cut else None
    if cut and not bool((logits.float() >= 0).any(-1).all()):
        threshold = logits.float().amin(-1) / temperature
    for move in range(4):
        given = gumbel_sample_triton(logits, temperature, seeds, positions + move, threshold=threshold)
        expected = gumbel_sample_reference(logits.float(), temperature, seeds, positions + move, threshold)
        assert torch.equal(given, expected)


def test_the_noise_itself_is_the_references(device: str) -> None:
    """Where one token is far ahead by its noise alone, every token gets its turn."""
    seeds = torch.arange(3, device=device).repeat_interleave(60)
    positions = torch.arange(60, device=device).repeat(3)
    flat = torch.zeros(180, 2000, device=device)
    given = gumbel_sample_triton(flat, torch.ones(180, device=device), seeds, positions)
    assert torch.equal(given, gumbel_noise(seeds, positions, 2000).argmax(-1))
    assert len(set(given.tolist())) > 160


def test_temperature_zero_is_greedy_and_ties_go_to_the_first(device: str) -> None:
    logits = torch.randn(3, 1500, device=device)
    logits[0, [40, 1400]] = 9.0
    logits[2, 7] = float("nan")
    zero, one = torch.zeros(3, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    given = gumbel_sample_triton(logits, zero, one, one)
    assert given.tolist() == [40, int(logits[1].argmax()), 7]


SETTINGS = [(0, 1.0), (1, 1.0), (7, 1.0), (0, 0.9), (0, 0.01), (50, 0.5), (3000, 1.0), (0, 0.999), (20, 0.0)]


@pytest.mark.parametrize(
    ("vocab_size", "spread"),
    [(1, 1.0), (60, 0.1), (257, 3.0), pytest.param(5000, 0.1, marks=pytest.mark.kernels), (5000, 3.0)],
)
def test_as_many_tokens_are_kept_as_by_sorting(vocab_size: int, spread: float, device: str) -> None:
    scaled = (torch.randn(len(SETTINGS), vocab_size + 1, device=device) * spread)[:, 1:]
    scaled[:, ::9] = float("-inf") if vocab_size > 9 else 0.0
    top_k = rows([min(k, vocab_size) for k, _ in SETTINGS], device)
    top_p = rows([p for _, p in SETTINGS], device, torch.float32)
    given = topk_topp_threshold_triton(scaled, top_k, top_p)
    expected = topk_topp_threshold_reference(scaled, top_k, top_p)
    kept, wanted = ((scaled >= cut[:, None]).sum(-1) for cut in (given, expected))
    by_count = top_p == 1
    assert torch.equal(kept[by_count], wanted[by_count])
    # Over thousands of nearly equal tokens, float32 may place the cut a token earlier or later.
    assert ((kept - wanted).abs() <= wanted // 500 + (wanted > 100)).all(), (kept, wanted)


def test_ties_at_the_cut_are_all_kept_and_the_zeros_are_equal(device: str) -> None:
    scaled = rows([1.0, 3.0, 3.0, 3.0, 0.0, -0.0, -2.0], device, torch.float32).expand(2, -1)
    cut = topk_topp_threshold_triton(scaled, rows([2, 5], device), torch.ones(2, device=device))
    assert (scaled >= cut[:, None]).sum(-1).tolist() == [3, 6]


def test_min_p_counts_from_the_likeliest(device: str) -> None:
    scaled = rows([0.0, 1.0, 2.0, 3.0], device, torch.float32).expand(3, -1)
    off, on = rows([0, 0, 2], device), torch.ones(3, device=device)
    min_p = rows([0.0, 0.3, 0.01], device, torch.float32)
    cut = topk_topp_threshold_triton(scaled, off, on, min_p=min_p)
    assert (scaled >= cut[:, None]).sum(-1).tolist() == [4, 2, 2]


def test_what_cannot_be_searched_is_refused(device: str) -> None:
    logits, row = torch.randn(4, 2, device=device).T, torch.ones(2, device=device)
    with pytest.raises(ValueError, match="adjacent"):
        gumbel_sample_triton(logits, row, row.long(), row.long())
    with pytest.raises(ValueError, match="float32"):
        topk_topp_threshold_triton(logits.half(), row.long(), row)
