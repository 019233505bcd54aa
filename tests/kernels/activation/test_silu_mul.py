import pytest
import torch

from quire_kernels.activation.silu_mul import silu_mul, silu_mul_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_its_reference(dtype: torch.dtype) -> None:
    gate_up = torch.randn(7, 64, dtype=dtype)
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_reference(gate_up))
