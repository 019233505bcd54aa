"""Launch of `paged_decode_attention` on a GPU, imported only where there is a GPU (why:
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
from quire_kernels.launch_config import TRITON_TYPES
from quire_kernels.paged_kv_cache import PagedKVCache
from quire_kernels.tuned_configs import DECODE


def paged_decode_attention_triton(
    q: Tensor,
    kv: PagedKVCache,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    splits: int | None = None,
    tile: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> Tensor:
    """As ``paged_decode_attention``; a sequence of length 0 (padding) gives zeros.

    ``splits``: parts of a sequence, a power of two; by default as many as fill the GPU. ``tile``: tokens per
    iteration. ``tile``, ``warps`` and ``stages`` default to `tuned_configs`.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    split_kv_attention(
        q[:, None],
        kv,
        scale,
        window=window,
        softcap=softcap,
        tree=None,
        out=out[:, None],
        splits=splits,
        tile=tile,
        warps=warps,
        stages=stages,
    )
    return out


_OWN = (
    split_launch_config("decode", 4, 128, 64, 4, 3),
    split_launch_config("decode", 4, 128, 64, 4, 3, splits=1),
    split_launch_config("decode", 4, 128, 64, 4, 3, block=16),
    split_launch_config("decode", 4, 128, 32, 4, 2),
    split_launch_config("decode", 4, 128, 64, 4, 5),
    split_launch_config("decode", 4, 128, 128, 8, 3, min_blocks=2),
    split_launch_config("decode", 4, 128, 32, 4, 3, cache="fp8e4nv"),
    split_launch_config("decode", 4, 128, 32, 4, 3, cache="i8"),
    split_launch_config("decode", 3, 64, 64, 4, 3),
    split_launch_config("decode", 1, 96, 64, 4, 3),
    split_launch_config("decode", 1, 80, 64, 4, 3),
    split_launch_config("decode", 2, 256, 64, 4, 3, windowed=True, capped=True, min_blocks=2),
    split_launch_config("decode", 8, 128, 64, 4, 3, windowed=True),
    reduce_launch_config("decode", 128, 32),
    reduce_launch_config("decode", 256, 8),
)
_TUNED = (
    split_launch_config("decode", group, size, *launch[:3], cache=TRITON_TYPES[cache], min_blocks=1)
    for (_, group, size, cache), launch in DECODE.items()
)
LAUNCH_CONFIGS = tuple({each.name: each for each in (*_TUNED, *_OWN)}.values())
