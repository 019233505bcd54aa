"""Bidirectional attention in Triton equals its float32 reference."""

from typing import Any

import pytest
import torch

from quire_kernels.attention.bidirectional_attention import bidirectional_attention_reference
from quire_kernels.attention.bidirectional_attention_triton import (
    bidirectional_attention_triton,
    bidirectional_tiling,
)
from quire_kernels.attention.paged_prefill_attention_triton import Tiling
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.tolerances import assert_near

# Attention rounds its weights to the dtype that tensor cores multiply in.
BOUNDS: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {},
    torch.float16: {"rms": 1e-3, "largest": 2e-3},
    torch.bfloat16: {"rms": 3e-3, "largest": 9e-3},
}
FACTORS: dict[str, Any] = {
    "lengths": [[5, 30, 1], [123], [64, 64], [1, 1, 1], [17, 0, 130]],
    "heads": [1, 3],
    "size": [16, 32, 64, 80, 128],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "tiling": [None, Tiling(32, 32, 4, 2), Tiling(64, 16, 4, 2)],
}


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_it_equals_its_reference(case: dict[str, Any], device: str) -> None:
    lengths, heads, size = case["lengths"], case["heads"], case["size"]
    qkv = torch.randn(sum(lengths), 3, heads, size, device=device).to(case["dtype"])
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    arguments = (*qkv.unbind(1), bounds, size**-0.5)
    expected = bidirectional_attention_reference(*arguments)
    found = bidirectional_attention_triton(*arguments, tiling=case["tiling"])
    assert_near(found, expected, **BOUNDS[case["dtype"]])


def test_what_the_kernel_cannot_read_is_refused(device: str) -> None:
    qkv, bounds = torch.randn(4, 3, 2, 16, device=device), torch.tensor([0, 4], device=device)
    q, k, v = qkv.unbind(1)
    with pytest.raises(ValueError, match="one layout"):
        bidirectional_attention_triton(q.contiguous(), k, v, bounds, 1.0)
    with pytest.raises(ValueError, match="adjacent"):
        bidirectional_attention_triton(q, k, v, bounds, 0.0)
    assert bidirectional_attention_triton(q[:0], k[:0], v[:0], bounds[:1], 1.0).shape == (0, 2, 16)


def test_wide_heads_and_elements_have_smaller_tiles() -> None:
    assert (
        bidirectional_tiling(64, 2).rows
        > bidirectional_tiling(64, 4).rows
        == bidirectional_tiling(256, 2).rows
    )
