"""`paged_decode_attention` for CUDA tensors, imported only where there is a GPU (why: `add_rmsnorm_triton`).
The kernel is `split_kv_attention_triton`'s.
"""

import torch
from torch import Tensor

from quire_kernels.gpu_type import POINTERS
from quire_kernels.kv_quantization import KVScales
from quire_kernels.split_kv_attention_triton import split_kv_attention
from quire_kernels.split_kv_configurations import reduce_configuration, split_configuration
from quire_kernels.tuned import DECODE


def paged_decode_attention_triton(
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
    out: Tensor | None = None,
    splits: int | None = None,
    tile: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> Tensor:
    """As ``paged_decode_attention``; a row of length 0, as padding has it, gives zeros.

    ``splits``: parts of a sequence, a power of two, by default what fills the GPU; ``tile``: tokens at once.
    ``warps`` and ``stages`` as ``CONFIGURATIONS`` has them; all by default as the tuning found them.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    split_kv_attention(
        q[:, None],
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        scale,
        window=window,
        softcap=softcap,
        scales=scales,
        tree=None,
        out=out[:, None],
        splits=splits,
        tile=tile,
        warps=warps,
        stages=stages,
    )
    return out


_OWN = (
    split_configuration("decode", 4, 128, 64, 4, 3),
    split_configuration("decode", 4, 128, 64, 4, 3, splits=1),
    split_configuration("decode", 4, 128, 64, 4, 3, block=16),
    split_configuration("decode", 4, 128, 32, 4, 2),
    split_configuration("decode", 4, 128, 64, 4, 5),
    split_configuration("decode", 4, 128, 128, 8, 3, min_blocks=2),
    split_configuration("decode", 4, 128, 32, 4, 3, cache="fp8e4nv"),
    split_configuration("decode", 4, 128, 32, 4, 3, cache="i8"),
    split_configuration("decode", 3, 64, 64, 4, 3),
    split_configuration("decode", 1, 96, 64, 4, 3),
    split_configuration("decode", 1, 80, 64, 4, 3),
    split_configuration("decode", 2, 256, 64, 4, 3, windowed=True, capped=True, min_blocks=2),
    split_configuration("decode", 8, 128, 64, 4, 3, windowed=True),
    reduce_configuration("decode", 128, 32),
    reduce_configuration("decode", 256, 8),
)
_TUNED = (
    split_configuration("decode", group, size, *launch[:3], cache=POINTERS[cache], min_blocks=1)
    for (_, group, size, cache), launch in DECODE.items()
)
CONFIGURATIONS = tuple({each.name: each for each in (*_TUNED, *_OWN)}.values())
