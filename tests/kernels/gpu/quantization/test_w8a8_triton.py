"""W8A8 with its Triton kernels gives the bits of the reference, by three launches."""

import pytest
import torch

from quire_kernels.quantization.w8a8 import w8a8, w8a8_reference
from quire_kernels.quantization.w8a8_triton import quantize_rows_triton
from tests.kernels.gpu.as_cuda import as_cuda
from tests.kernels.gpu.strided_tensors import rows
from tests.kernels.quantization.test_w8a8 import layer


@pytest.mark.parametrize(
    ("count", "inputs", "outputs"), [(1, 64, 48), (5, 136, 8), (16, 576, 1032), (40, 64, 48)]
)
def test_it_is_the_reference_with_three_launches_a_linear(
    count: int, inputs: int, outputs: int, device: str
) -> None:
    x, weight, scales, bias = (each.to(device) for each in layer(count, inputs, outputs))
    x[0] *= 300
    for given in (bias, None):
        with as_cuda() as called:
            y = w8a8(x, weight, scales, given)
        assert called == ["quantize_rows_triton", "scale_sums_triton"], "and the product between them"
        assert torch.equal(y, w8a8_reference(x, weight, scales, given))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gives_no_number_and_changes_no_other(bad: float, device: str) -> None:
    x, weight, scales, bias = (each.to(device) for each in layer(20, 64, 16))
    with as_cuda():
        whole = w8a8(x, weight, scales, bias)
        x[7, 5] = bad
        spoilt = w8a8(x, weight, scales, bias)
    assert not spoilt[7].isfinite().any()
    assert torch.equal(torch.cat((spoilt[:7], spoilt[8:])), torch.cat((whole[:7], whole[8:])))


def test_strided_inputs_are_read_and_others_refused(device: str) -> None:
    x = rows(4, 60, torch.bfloat16, 7, device)
    values, _ = quantize_rows_triton(x, 4)
    assert torch.equal(values, quantize_rows_triton(x.contiguous(), 4)[0])
    with pytest.raises(ValueError, match="adjacent"):
        quantize_rows_triton(x.T, 60)
