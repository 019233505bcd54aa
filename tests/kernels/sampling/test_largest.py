"""The largest logit of each row, by the CPU's kernel and by torch."""

import pytest
import torch
from torch import Tensor

from quire_kernels.sampling.largest import (
    largest,
    largest_pair,
    largest_pair_reference,
    largest_reference,
)

pytestmark = pytest.mark.usefixtures("each_isa")

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16]


def equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 1000, 16_000])
def test_each_row_has_its_largest_and_the_number_of_it(dtype: torch.dtype, width: int) -> None:
    logits = torch.randn(9, width + 40).to(dtype)[:, :width]  # parts of longer rows, as without padding
    found = largest(logits, 16_000)
    equal(found, largest_reference(logits, 16_000))
    assert found[:, 0].tolist() == logits.float().amax(1).tolist()
    assert found[:, 1].tolist() == (16_000 + logits.float().numpy().argmax(1)).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("row", "value", "place"), [
    ([1.0, 3.0, 2.0, 3.0], 3.0, 1),
    ([0.0, -0.0], 0.0, 0),
    ([-INF] * 20, -INF, 0),
    ([-INF] * 19 + [-5.0], -5.0, 19),
    ([1.0, INF, INF], INF, 1),
    ([1.0] * 18 + [NAN, 7.0, NAN], NAN, 18),
    ([INF, NAN], NAN, 1),
    ([], -INF, 0),
])  # fmt: skip
def test_of_equals_it_is_the_first_and_nan_is_larger_than_all(
    dtype: torch.dtype, row: list[float], value: float, place: int
) -> None:
    logits, expected = torch.tensor([row]).to(dtype), torch.tensor([[value, 100 + place]])
    equal(largest(logits, 100), expected)
    equal(largest_reference(logits, 100), expected)


@pytest.mark.parametrize(("pairs", "expected"), [
    ([1.0, 7.0, 2.0, 9.0], [2.0, 9.0]),
    ([2.0, 7.0, 2.0, 9.0, 2.0, 11.0], [2.0, 7.0]),
    ([5.0, 7.0, NAN, 9.0, NAN, 11.0], [NAN, 9.0]),
    ([-INF, 0.0, -INF, 9.0], [-INF, 0.0]),
    ([3.0, 4.0], [3.0, 4.0]),
])  # fmt: skip
def test_the_first_rank_takes_the_largest_of_all_ranks(pairs: list[float], expected: list[float]) -> None:
    given, wanted = torch.tensor([pairs, pairs]), torch.tensor([expected, expected])
    equal(largest_pair(given), wanted)
    equal(largest_pair_reference(given), wanted)
