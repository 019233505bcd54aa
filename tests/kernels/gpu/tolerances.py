"""Tolerances of the kernels' tests: of the largest and of the root mean square deviation."""

import torch
from torch import Tensor

# Of the largest expected number. A rounding of bfloat16 is up to 2 ** -9 of the number itself.
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def assert_near(
    actual: Tensor, expected: Tensor, rms: float | None = None, largest: float | None = None
) -> None:
    """RMS deviation over RMS <= ``rms``, largest deviation over largest value <= ``largest``, NaN in the same
    places.

    The default bounds allow one rounding of the dtype.
    """
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    actual, expected, dtype = actual.cpu().double(), expected.cpu().double(), actual.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    there = ~expected.isnan()
    actual, expected = actual[there], expected[there]
    if not expected.numel():
        return
    apart = (actual - expected).abs()
    rms = BOUNDS[dtype] / 2 if rms is None else rms
    largest = BOUNDS[dtype] if largest is None else largest
    found_rms = apart.square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-30)
    found_largest = apart.max() / expected.abs().max().clamp(min=1e-30)
    assert found_rms <= rms and found_largest <= largest, (float(found_rms), float(found_largest))
