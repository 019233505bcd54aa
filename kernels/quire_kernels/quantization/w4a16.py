"""Linear layer with 4-bit weights and 16-bit activations (AWQ, GPTQ, compressed-tensors).

Checkpoints are repacked once, when they are loaded, by `w4a16_packing`.
"""

import torch
from torch import Tensor

from quire_kernels.quantization.w4a16_packing import W4Weight, w4_dequantize

if torch.cuda.is_available():
    from quire_kernels.quantization.w4a16_triton import w4a16_triton


def w4a16(x: Tensor, weight: W4Weight, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x [M, K] in bfloat16 or float16 -> [M, N] in its dtype; bias [N]."""
    if x.is_cuda:
        return w4a16_triton(x, weight, bias, out=out)
    return w4a16_reference(x, weight, bias, out=out)


def w4a16_reference(
    x: Tensor, weight: W4Weight, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Dequantized and multiplied in float32."""
    y = x.float() @ w4_dequantize(weight)
    y = (y if bias is None else y + bias.float()).to(x.dtype)
    return y if out is None else out.copy_(y)
