"""Symmetric quantization to INT8 or FP8 (e4m3) with one scale per row: activations, and keys and values."""

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest magnitude that is stored


def quantize_rows(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [..., D] -> (stored [..., D], scales f32 [...]), so that stored * scale approximates x.

    ``scale``: a fixed scale for all rows instead of the largest element of each; larger values saturate. A
    row with a NaN or an infinity gets the scale NaN, so that all of it reads back as NaN.
    """
    largest = LARGEST[dtype]
    x = x.float()
    scales = x.abs().amax(-1) / largest if scale is None else scale.float().expand(x.shape[:-1])
    scaled = (x / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).clamp_(-largest, largest)
    if dtype == torch.int8:
        scaled.round_()
    if scale is not None:
        scales = torch.where(x.isfinite().all(-1), scales, torch.nan)
    return scaled.to(dtype), scales
