"""`silu_mul` fused with FP8 quantization of its result, for a down projection with FP8 weights."""

import torch
from torch import Tensor

from quire_kernels.activation.silu_mul import silu_mul_reference
from quire_kernels.quantization.fp8_quantize import Quantized, fp8_quantize_reference

if torch.cuda.is_available():
    from quire_kernels.activation.silu_mul_fp8_triton import silu_mul_fp8_triton


def silu_mul_fp8(gate_up: Tensor, *, out: Quantized | None = None) -> Quantized:
    """[tokens, 2 * intermediate] -> (e4m3 [tokens, intermediate], scales f32 [tokens, 1]).

    Bitwise equal to ``fp8_quantize(silu_mul(...))``: the activation is rounded to its dtype in between.
    """
    if gate_up.is_cuda:
        return silu_mul_fp8_triton(gate_up, out=out)
    return silu_mul_fp8_reference(gate_up, out=out)


def silu_mul_fp8_reference(gate_up: Tensor, *, out: Quantized | None = None) -> Quantized:
    """The two references, one after the other."""
    return fp8_quantize_reference(silu_mul_reference(gate_up), out=out)
