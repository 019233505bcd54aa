"""LoRA (arXiv:2106.09685): adds each token's low-rank update to a linear layer's result, on a GPU.

On a CPU it is `host_lora`, where adapters of several ranks take no more memory than they use.
"""

import torch
from torch import Tensor

from quire_kernels.moe.row_groups import RowGroups

if torch.cuda.is_available():
    from quire_kernels.lora.add_lora_triton import add_lora_triton


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: RowGroups, sizes: tuple[int, ...]
) -> Tensor:
    """y [T, N] += B (A x) with each token's adapter, in place; returns y.

    x [T, K]; ``adapters``: ``group_rows`` of the tokens' adapter numbers, -1 for none. The result of a layer
    has up to three parts (q, k, v) of ``sizes`` columns, each with its own A and B: a [L, parts * R, K] holds
    all A, b [L, N, R] all B, already multiplied by the adapter's alpha / R. A x is rounded to the dtype of B.
    Adapters of a smaller rank are padded with zeros.
    """
    if x.is_cuda:
        return add_lora_triton(y, x, a, b, adapters, sizes)
    return add_lora_reference(y, x, a, b, adapters, sizes)


def add_lora_reference(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: RowGroups, sizes: tuple[int, ...]
) -> Tensor:
    """One token and part at a time."""
    rank = b.shape[2]
    for token, adapter in enumerate(adapters.of.tolist()):
        if adapter < 0:
            continue
        shrunk = (a[adapter].float() @ x[token].float()).to(b.dtype).float()
        begin = 0
        for part, size in enumerate(sizes):
            added = b[adapter, begin : begin + size].float() @ shrunk[part * rank : (part + 1) * rank]
            y[token, begin : begin + size] = (y[token, begin : begin + size].float() + added).to(y.dtype)
            begin += size
    return y
