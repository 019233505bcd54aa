"""Sampling and thresholds in Triton equal their references, token by token."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.sampling.gumbel_sample import gumbel_noise, gumbel_sample_reference
from quire_kernels.sampling.gumbel_sample_triton import gumbel_sample_triton
from quire_kernels.sampling.topk_topp_threshold import topk_topp_threshold_reference
from quire_kernels.sampling.topk_topp_threshold_triton import topk_topp_threshold_triton
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.strided_tensors import rows

SEEDS = [1, -7, 3, 3, 1 << 62, 0, -1, (1 << 63) - 1]
POSITIONS = [0, 5, 9, 10, 7, 1 << 33, (1 << 32) - 1, 2]


def row(values: list[float], device: str, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


DRAWS: dict[str, Any] = {
    "vocab": [123, 1, 5, 257, 2057, 4099],
    "rows": [8, 1, 0],
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "is_cut": [False, True],
    "apart": [3, 0],
    "has_out": [False, True],
}


@pytest.mark.parametrize("case", cases(DRAWS), ids=str)
def test_it_samples_the_same_tokens_as_the_reference(case: dict[str, Any], device: str) -> None:
    logits = rows(8, case["vocab"], case["dtype"], case["apart"], device)[: case["rows"]]
    temperature = torch.rand(8, device=device)[: case["rows"]] + 0.2
    seeds, positions = (row(values[: case["rows"]], device) for values in (SEEDS, POSITIONS))
    threshold = logits.float().median(-1).values / temperature if case["is_cut"] else None
    out = torch.full_like(seeds, -9) if case["has_out"] else None
    for move in range(2):
        given = gumbel_sample_triton(
            logits, temperature, seeds, positions + move, threshold=threshold, out=out
        )
        expected = gumbel_sample_reference(logits.float(), temperature, seeds, positions + move, threshold)
        assert torch.equal(given, expected) and (given is out) == case["has_out"]


@pytest.mark.deep
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


CUTS: dict[str, Any] = {
    "vocab": [123, 1, 5, 257, 5000],
    "rows": [len(SETTINGS), 1, 0],
    "spread": [3.0, 0.1],
    "min_p": [None, 0.05],
    "apart": [1, 0],
    "has_out": [False, True],
}


@pytest.mark.parametrize("case", cases(CUTS), ids=str)
def test_the_same_number_of_tokens_is_kept_as_by_sorting(case: dict[str, Any], device: str) -> None:
    vocab_size, some = case["vocab"], SETTINGS[-case["rows"] :] if case["rows"] else []
    scaled = rows(len(some), vocab_size, torch.float32, case["apart"], device).mul_(case["spread"] / 3)
    scaled[:, ::9] = float("-inf") if vocab_size > 9 else 0.0
    top_k = row([min(k, vocab_size) for k, _ in some], device)
    top_p = row([p for _, p in some], device, torch.float32)
    min_p = None if case["min_p"] is None else torch.full_like(top_p, case["min_p"])
    out = torch.full_like(top_p, -9) if case["has_out"] else None
    given = topk_topp_threshold_triton(scaled, top_k, top_p, min_p=min_p, out=out)
    assert (given is out) == case["has_out"]
    expected = topk_topp_threshold_reference(scaled, top_k, top_p)
    if min_p is not None:
        expected = torch.maximum(expected, scaled.amax(-1) + min_p.log())
    kept, wanted = ((scaled >= cut[:, None]).sum(-1) for cut in (given, expected))
    by_count = top_p == 1
    assert torch.equal(kept[by_count], wanted[by_count])
    # Over thousands of nearly equal tokens, float32 may shift the threshold by one token.
    assert ((kept - wanted).abs() <= wanted // 500 + (wanted > 100)).all(), (kept, wanted)


@pytest.mark.parametrize("vocab_size", [10_000, pytest.param(40_000, marks=pytest.mark.kernels)])
@pytest.mark.parametrize("spread", [3.0, 0.01], ids=["few candidates", "flat, which takes the whole row"])
def test_a_large_vocabulary_is_cut_as_by_sorting(spread: float, vocab_size: int, device: str) -> None:
    settings = [(20, 0.95), (0, 0.95), (1000, 1.0), (1500, 0.9), (0, 0.5), (20, 1.0), (0, 1.0), (5, 0.3)]
    logits = torch.randn(8, vocab_size, device=device) * spread
    logits[5, 7:] = float("-inf")  # a grammar leaves fewer tokens than top-k would
    temperature = row([0.7, 1.0, 1.0, 1.3, 0.5, 1.0, 1.0, 0.0], device, torch.float32)
    top_k, top_p = row([k for k, _ in settings], device), row([p for _, p in settings], device, torch.float32)
    given = topk_topp_threshold_triton(logits, top_k, top_p, temperature=temperature)
    scaled = logits / temperature.where(temperature > 0, 1.0)[:, None]
    expected = topk_topp_threshold_reference(scaled, top_k, top_p)
    kept, wanted = ((scaled >= cut[:, None]).sum(-1) for cut in (given, expected))
    assert given[7] == given[6] == float("-inf"), "nothing is cut where a row takes its largest logit"
    assert kept[:6].tolist() == pytest.approx(wanted[:6].tolist(), rel=2e-3)
    assert torch.equal(kept[[2, 5]], wanted[[2, 5]])
    assert kept[5] == vocab_size, "with tokens that have no probability, all are above the threshold"


def test_ties_at_the_cut_are_all_kept_and_the_zeros_are_equal(device: str) -> None:
    scaled = row([1.0, 3.0, 3.0, 3.0, 0.0, -0.0, -2.0], device, torch.float32).expand(2, -1)
    cut = topk_topp_threshold_triton(scaled, row([2, 5], device), torch.ones(2, device=device))
    assert (scaled >= cut[:, None]).sum(-1).tolist() == [3, 6]


def test_min_p_is_relative_to_the_most_likely_token(device: str) -> None:
    scaled = row([0.0, 1.0, 2.0, 3.0], device, torch.float32).expand(3, -1)
    off, on = row([0, 0, 2], device), torch.ones(3, device=device)
    min_p = row([0.0, 0.3, 0.01], device, torch.float32)
    cut = topk_topp_threshold_triton(scaled, off, on, min_p=min_p)
    assert (scaled >= cut[:, None]).sum(-1).tolist() == [4, 2, 2]


def test_unsupported_inputs_are_refused(device: str) -> None:
    logits, row = torch.randn(4, 2, device=device).T, torch.ones(2, device=device)
    with pytest.raises(ValueError, match="adjacent"):
        gumbel_sample_triton(logits, row, row.long(), row.long())
    with pytest.raises(ValueError, match="logits must be float32"):
        topk_topp_threshold_triton(logits.half(), row.long(), row)
