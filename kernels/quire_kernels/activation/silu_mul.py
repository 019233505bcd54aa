"""SiLU gated activation (SwiGLU), the MLP activation of Llama."""

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.cpu.native import NATIVE

if torch.cuda.is_available():
    from quire_kernels.activation.silu_mul_triton import silu_mul_triton


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up for gate_up [tokens, 2 * intermediate] -> [tokens, intermediate]."""
    if gate_up.is_cuda:
        return silu_mul_triton(gate_up, out=out)
    y = _on_cpu(gate_up)
    return y if out is None else out.copy_(y)


def _on_cpu(gate_up: Tensor) -> Tensor:
    if NATIVE is not None and NATIVE.supports(gate_up):
        return NATIVE.silu_mul(gate_up)
    if gate_up.device.type == "cpu" and gate_up.dtype == torch.float32:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
    return silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """In float32, rounded where transformers rounds."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate.float()).to(gate_up.dtype) * up
