"""Ops with ``out`` write their result there."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels import add_rmsnorm, gelu_tanh_mul, gumbel_sample, silu_mul, topk_topp_threshold

ROWS = torch.linspace(-3, 5, 3 * 64).view(3, 64)
ONES, ZEROS = torch.ones(3), torch.zeros(3, dtype=torch.int64)
OPS: dict[str, Callable[..., Tensor]] = {
    "add_rmsnorm": lambda **more: add_rmsnorm(ROWS, ROWS.clone(), torch.ones(64), 1e-5, **more),
    "silu_mul": lambda **more: silu_mul(ROWS, **more),
    "gelu_tanh_mul": lambda **more: gelu_tanh_mul(ROWS, **more),
    "gumbel_sample": lambda **more: gumbel_sample(ROWS, ONES, ZEROS, ZEROS, **more),
    "topk_topp_threshold": lambda **more: topk_topp_threshold(ROWS, ZEROS + 5, ONES * 0.9, **more),
}


@pytest.mark.parametrize("name", OPS)
def test_out_is_filled_and_returned(name: str) -> None:
    expected = OPS[name]()
    out = torch.full_like(expected, 7)
    assert OPS[name](out=out) is out and torch.equal(out, expected)
