"""4-bit weights as checkpoints pack them give the same products as the dequantized ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.quantization.w4a16 import w4a16_reference
from quire_kernels.quantization.w4a16_packing import W4Weight, pack_w4
from quire_kernels.quantization.w4a16_triton import MANY_ROWS, MAX_SPLITS, w4a16_splits, w4a16_triton
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.strided_tensors import is_surrounding_untouched, output_in_wider_tensor, rows
from tests.kernels.gpu.tolerances import assert_near


def weight_of(
    inputs: int, outputs: int, size: int, scales: torch.dtype, device: str, *, ordered: bool = False
) -> W4Weight:
    groups = inputs // size
    return pack_w4(
        torch.randint(0, 16, (inputs, outputs), device=device),
        torch.randint(0, 17, (groups, outputs), device=device),
        (torch.rand(groups, outputs, device=device) * 0.02 + 1e-3).to(scales),
        torch.randperm(inputs, device=device) if ordered else None,
    )


FACTORS: dict[str, Any] = {
    "rows": [5, 1, 17, 123, 257, 0],  # 257: through dequantised weights
    "inputs": [(384, 128), (576, 64), (256, 256), (96, 32), (640, 128)],  # and the group size
    "outputs": [123, 1, 5, 64, 257],
    "dtype": [torch.bfloat16, torch.float16],
    "scales": [torch.float16, torch.bfloat16, torch.float32],
    "splits": [1, 2, 4],  # some splits have no group
    "has_bias": [False, True],
    "is_ordered": [False, True],
    "apart": [8, 0],
    "has_out": [False, True],
}


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_it_equals_the_product_with_the_dequantized_weights(case: dict[str, Any], device: str) -> None:
    count, outputs, dtype = case["rows"], case["outputs"], case["dtype"]
    inputs, size = case["inputs"]
    weight = weight_of(inputs, outputs, size, case["scales"], device, ordered=case["is_ordered"])
    x = rows(count, inputs, dtype, case["apart"], device)
    bias = torch.randn(outputs, device=device).to(dtype) if case["has_bias"] else None
    expected = w4a16_reference(x, weight, bias)
    whole, out = output_in_wider_tensor(expected)
    given = w4a16_triton(x, weight, bias, splits=case["splits"], out=out if case["has_out"] else None)
    # With many rows the weights are rounded too.
    assert_near(given, expected, *((3e-3, 8e-3) if count >= MANY_ROWS and dtype == torch.bfloat16 else ()))
    assert is_surrounding_untouched(whole) and (given is out) == case["has_out"]


def test_nothing_is_rounded_before_the_sum(device: str) -> None:
    """Integers whose sum bfloat16 represents: the result is exact for all 4-bit values and zero points."""
    values = torch.arange(16, device=device)[:, None].repeat(8, 16)
    zeros = torch.arange(1, 17, device=device)[None]
    weight = pack_w4(values, zeros, torch.ones(1, 16, device=device))
    x = torch.eye(128, device=device)[:32].bfloat16()
    expected = (values[:32] - zeros).bfloat16()
    assert torch.equal(w4a16_triton(x, weight), expected)


def test_splits_fill_the_multiprocessors_and_no_more() -> None:
    assert w4a16_splits(1, 4096, 32, 132) == 4
    assert w4a16_splits(1, 576, 9, 132) == 8
    assert w4a16_splits(1, 64, 1000, 132) == MAX_SPLITS
    assert w4a16_splits(512, 14336, 32, 132) == w4a16_splits(1, 64, 1, 132) == 1


def test_a_row_does_not_depend_on_other_rows(device: str) -> None:
    weight = weight_of(256, 40, 64, torch.float16, device)
    x = torch.randn(5, 256, device=device).bfloat16()
    whole: Tensor = w4a16_triton(x, weight, splits=2)
    assert torch.equal(whole[2:3], w4a16_triton(x[2:3], weight, splits=2))


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    weight = weight_of(128, 32, 64, torch.float16, device)
    x = torch.randn(2, 128, device=device)
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        w4a16_triton(x, weight)
    with pytest.raises(ValueError, match="128 adjacent elements"):
        w4a16_triton(x[:, :64].half(), weight)
    with pytest.raises(ValueError, match=r"out must be torch.float16 \[2, 32\]"):
        w4a16_triton(x.half(), weight, out=torch.empty(2, 32, device=device))
    with pytest.raises(ValueError, match="a multiple of 32"):
        pack_w4(torch.zeros(96, 8), torch.zeros(6, 8), torch.ones(6, 8))
