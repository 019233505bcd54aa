"""The test interpreter itself, and that its patches end with its context."""

import inspect

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from tests.kernels.gpu.interpreter import interpreted


@triton.jit
def _inner(x):
    return tl.sum(x, 0)


@triton.jit
def _summed(x, y, n, BLOCK: tl.constexpr):
    total = 0.0
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += _inner(tl.load(x + at, mask=at < n, other=0.0))
    tl.store(y, total / tl.cdiv(n, BLOCK))


def faces() -> dict[tuple[int, str], object]:
    owners = (tl, tl.core, tl.math, tl.tensor, tl.dtype, JITFunction)
    return {(id(owner), name): inspect.getattr_static(owner, name) for owner in owners for name in dir(owner)}


def test_kernels_call_others_and_loop_to_a_number_known_at_run_time() -> None:
    x, y = torch.randn(37), torch.zeros(1)
    with interpreted():
        _summed[(1,)](x, y, 37, BLOCK=16)
    torch.testing.assert_close(y[0], x.sum() / 3)


def test_it_leaves_no_patches_behind() -> None:
    before = faces()
    with interpreted():
        assert faces() != before
        _summed[(1,)](torch.randn(37), torch.zeros(1), 37, BLOCK=16)
    assert faces() == before


def test_outside_of_it_device_functions_cannot_be_called() -> None:
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        _inner(torch.ones(1))
