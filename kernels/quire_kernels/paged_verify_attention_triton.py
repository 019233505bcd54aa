"""`paged_verify_attention` for CUDA tensors, imported only where there is a GPU (why: `add_rmsnorm_triton`).
The kernel is `split_kv_attention_triton`'s.
"""

import torch
from torch import Tensor

from quire_kernels.kv_quantization import KVScales
from quire_kernels.split_kv_attention_triton import split_kv_attention
from quire_kernels.split_kv_configurations import reduce_configuration, split_configuration


def paged_verify_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scales: KVScales | None = None,
    tree: Tensor | None = None,
    out: Tensor | None = None,
    splits: int | None = None,
    tile: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> Tensor:
    """As ``paged_verify_attention``; ``splits``, ``tile``, ``warps`` and ``stages`` as for decode."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    return split_kv_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        scale,
        window=window,
        softcap=softcap,
        scales=scales,
        tree=tree,
        out=out,
        splits=splits,
        tile=tile,
        warps=warps,
        stages=stages,
    )


CONFIGURATIONS = (
    split_configuration("verify 4 tokens,", 4, 128, 64, 4, 3, queries=4),
    split_configuration("verify 8 tokens,", 4, 128, 64, 4, 3, queries=8, min_blocks=2),
    split_configuration("verify 8 tokens,", 4, 128, 64, 4, 3, queries=8, splits=1, min_blocks=2),
    split_configuration("verify 5 tokens,", 3, 64, 64, 4, 3, queries=5),
    split_configuration("verify 4 tokens,", 4, 128, 32, 4, 3, queries=4, cache="fp8e4nv", min_blocks=2),
    split_configuration("verify 4 tokens,", 4, 128, 32, 4, 3, queries=4, cache="i8", min_blocks=2),
    split_configuration(
        "verify 4 tokens,", 2, 256, 64, 4, 3, queries=4, windowed=True, capped=True, min_blocks=2
    ),
    split_configuration("verify 16 tokens,", 4, 128, 32, 4, 3, queries=16, tree=True, min_blocks=2),
    split_configuration("verify 64 tokens,", 8, 128, 32, 4, 3, queries=64, tree=True, min_blocks=2),
    reduce_configuration("verify 4 tokens", 128, 32, queries=4),
)
