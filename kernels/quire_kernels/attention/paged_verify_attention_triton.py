"""Launch of `paged_verify_attention` on a GPU, imported only where there is a GPU (why:
`add_rmsnorm_triton`).

The Triton kernel is in `split_kv_attention_triton`.
"""

import torch
from torch import Tensor

from quire_kernels.attention.split_kv_attention_triton import (
    reduce_launch_config,
    split_kv_attention,
    split_launch_config,
)
from quire_kernels.paged_kv_cache import PagedKVCache


def paged_verify_attention_triton(
    q: Tensor,
    kv: PagedKVCache,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
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
        kv,
        scale,
        window=window,
        softcap=softcap,
        tree=tree,
        out=out,
        splits=splits,
        tile=tile,
        warps=warps,
        stages=stages,
    )


LAUNCH_CONFIGS = (
    split_launch_config("verify 4 tokens,", 4, 128, 64, 4, 3, queries=4),
    split_launch_config("verify 8 tokens,", 4, 128, 64, 4, 3, queries=8, min_blocks=2),
    split_launch_config("verify 8 tokens,", 4, 128, 64, 4, 3, queries=8, splits=1, min_blocks=2),
    split_launch_config("verify 5 tokens,", 3, 64, 64, 4, 3, queries=5),
    split_launch_config("verify 4 tokens,", 4, 128, 32, 4, 3, queries=4, cache="fp8e4nv", min_blocks=2),
    split_launch_config("verify 4 tokens,", 4, 128, 32, 4, 3, queries=4, cache="i8", min_blocks=2),
    split_launch_config(
        "verify 4 tokens,", 2, 256, 64, 4, 3, queries=4, windowed=True, capped=True, min_blocks=2
    ),
    split_launch_config("verify 16 tokens,", 4, 128, 32, 4, 3, queries=16, tree=True, min_blocks=2),
    split_launch_config("verify 64 tokens,", 8, 128, 32, 4, 3, queries=64, tree=True, min_blocks=2),
    reduce_launch_config("verify 4 tokens", 128, 32, queries=4),
)
