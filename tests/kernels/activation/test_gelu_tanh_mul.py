import torch

from quire_kernels.activation.gelu_tanh_mul import gelu_tanh_mul, gelu_tanh_mul_reference


def test_it_equals_its_reference() -> None:
    gate_up = torch.randn(5, 24) * 3
    torch.testing.assert_close(gelu_tanh_mul(gate_up), gelu_tanh_mul_reference(gate_up))
    half = gate_up.bfloat16()
    torch.testing.assert_close(gelu_tanh_mul(half), gelu_tanh_mul_reference(half))
