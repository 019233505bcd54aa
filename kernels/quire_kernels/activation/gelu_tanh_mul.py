"""GELU (tanh approximation) gated activation, the MLP activation of Gemma."""

import torch
from torch import Tensor
from torch.nn import functional

if torch.cuda.is_available():
    from quire_kernels.activation.gelu_tanh_mul_triton import gelu_tanh_mul_triton


def gelu_tanh_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """gelu(gate) * up, by the tanh approximation: [tokens, 2 * intermediate] -> [tokens, intermediate]."""
    if gate_up.is_cuda:
        return gelu_tanh_mul_triton(gate_up, out=out)
    y = _on_cpu(gate_up)
    return y if out is None else out.copy_(y)


def _on_cpu(gate_up: Tensor) -> Tensor:
    if gate_up.device.type == "cpu" and gate_up.dtype == torch.float32:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up)
    return gelu_tanh_mul_reference(gate_up)


def gelu_tanh_mul_reference(gate_up: Tensor) -> Tensor:
    """As Hendrycks and Gimpel (arXiv:1606.08415), in float32, rounded where transformers rounds."""
    gate, up = gate_up.chunk(2, dim=-1)
    x = gate.float()
    inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x.pow(3))
    return (0.5 * x * (1 + torch.tanh(inner))).to(gate_up.dtype) * up
