"""What adapters of low rank add to a linear layer's result (arXiv:2106.09685), each token's own. Called by
nothing yet: the server has no adapters.
"""

import torch
from torch import Tensor

from quire_kernels.row_groups import RowGroups

if torch.cuda.is_available():
    from quire_kernels.lora_triton import add_lora_triton


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: RowGroups, sizes: tuple[int, ...]
) -> Tensor:
    """y [T, N] += B (A x) of each token's adapter, in place; returns y.

    x [T, K]; ``adapters``: ``group_rows`` of the tokens' adapters, -1: none. A layer's result has up to
    three parts (q, k, v) of ``sizes`` columns, with a pair of matrices for each: a [L, parts * R, K] has all
    of A, b [L, N, R] all of B, into which the adapter's alpha / R has been multiplied. B takes A's results
    rounded to its own dtype. A smaller rank is filled up with zeros.
    """
    if x.is_cuda:
        return add_lora_triton(y, x, a, b, adapters, sizes)
    return add_lora_reference(y, x, a, b, adapters, sizes)


def add_lora_reference(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: RowGroups, sizes: tuple[int, ...]
) -> Tensor:
    """One token and part after the other."""
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
