"""Tokens drawn from logits by the CPU's function, against the definition by torch."""

import pytest
import torch
from torch import Tensor

from quire_kernels.cpu.library import LIBRARY
from quire_kernels.cpu.native import choices
from quire_kernels.cpu.token_sampler import TOKEN_SAMPLER, TokenSampler
from quire_kernels.sampling.sample_tokens import sample_tokens, sample_tokens_reference

NAN, INF = float("nan"), float("inf")
ROWS = 8


def parameters(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, rows: int = ROWS
) -> tuple[Tensor, ...]:
    """The same of each row, and seeds and positions of their own."""
    return (
        torch.arange(rows),
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.randint(-(2**63), 2**63 - 1, (rows,)),
        torch.randint(0, 2**40, (rows,)),
    )


def test_the_function_is_built() -> None:
    assert TOKEN_SAMPLER is not None and TOKEN_SAMPLER.supports(torch.zeros(1, 5))


# Flat and steep distributions, below and above the size of a block and of what is sorted.
@pytest.mark.one_in(2)
@pytest.mark.parametrize("vocab", [1, 3, 63, 64, 65, 1000, 40_001])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("given", [
    {},
    {"temperature": 0.05},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 1 << 40},
    {"top_k": 3000, "top_p": 0.9},
    {"top_p": 1e-6},
    {"temperature": 0.7, "top_p": 0.95},
    {"top_p": 0.999999},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02},
])  # fmt: skip
def test_it_draws_the_tokens_of_the_definition(vocab: int, spread: float, given: dict[str, float]) -> None:
    logits = spread * torch.randn(ROWS, vocab)
    values = parameters(**given)
    tokens, largest = sample_tokens(logits, *values)
    wanted, peaks = sample_tokens_reference(logits, *values)
    assert tokens.tolist() == wanted.tolist()
    assert largest.tolist() == peaks.tolist()


@pytest.mark.parametrize("instructions", [*choices(LIBRARY), "any"])
@pytest.mark.parametrize("vocab", [65, 20_000])
@pytest.mark.parametrize("given", [{}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.01}])
def test_every_cpu_draws_the_same_tokens(instructions: str, vocab: int, given: dict[str, float]) -> None:
    assert LIBRARY is not None
    logits, values = 3 * torch.randn(ROWS, vocab), parameters(**given)
    wanted, peaks = sample_tokens_reference(logits, *values)
    tokens, largest = TokenSampler(LIBRARY, instructions).sample(logits, *values)
    assert (tokens.tolist(), largest.tolist()) == (wanted.tolist(), peaks.tolist())


def test_it_draws_each_token_as_often_as_its_probability_says() -> None:
    count = 40_000
    logits = torch.tensor([[0.0, 1.0, 2.0, -INF]])
    rows, *others = parameters(rows=count)
    tokens, _ = sample_tokens(logits, torch.zeros_like(rows), *others)
    shares = torch.bincount(tokens, minlength=4) / count
    torch.testing.assert_close(shares, logits.softmax(-1)[0], rtol=0, atol=0.01)
    assert shares[3] == 0


def test_rows_may_be_greedy_and_drawn_and_come_from_anywhere_among_the_logits() -> None:
    logits = torch.randn(5, 900)
    rows, temperature, *others = parameters(rows=4)
    rows, temperature = torch.tensor([4, 0, 4, 2]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    tokens, _ = sample_tokens(logits, rows, temperature, *others)
    assert tokens[[0, 3]].tolist() == logits[[4, 2]].argmax(-1).tolist()
    assert tokens.tolist() == sample_tokens_reference(logits, rows, temperature, *others)[0].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("row", "largest", "token"), [
    ([1.0, 3.0] + 98 * [2.0] + [3.0], 3.0, 1),
    (100 * [-INF], -INF, 0),
    (99 * [-INF] + [-5.0], -5.0, 99),
    (70 * [0.0] + [INF, 1.0, INF], INF, 70),
    (70 * [0.0] + [NAN, INF, NAN], NAN, 70),
])  # fmt: skip
def test_the_largest_is_the_first_of_equals_and_shows_a_row_that_is_not_sound(
    temperature: float, row: list[float], largest: float, token: int
) -> None:
    # With top-k 1 only the largest are drawn; of two that are equal either.
    tokens, found = sample_tokens(torch.tensor([row]), *parameters(temperature, top_k=1, rows=1))
    torch.testing.assert_close(found, torch.tensor([largest]), equal_nan=True)
    assert tokens.item() == token or (temperature and row[int(tokens)] == largest)


@pytest.mark.parametrize("given", [{"top_k": 2}, {"top_p": 0.9999999}])
def test_a_token_one_rounding_from_the_end_of_those_that_are_looked_at_can_be_drawn(
    given: dict[str, float],
) -> None:
    most = torch.tensor(3.3)
    for distance in (2.0, 4.0, 7.0):
        near = torch.nextafter(most - distance, torch.tensor(-INF))
        row = torch.full((40_001,), -30.0)
        row[7], row[39_000] = most, near
        rows, *others = parameters(**given, rows=600)
        tokens, _ = sample_tokens(row[None], torch.zeros_like(rows), *others)
        assert set(tokens.tolist()) <= {7, 39_000}
        assert (tokens == 39_000).any() or distance > 4
