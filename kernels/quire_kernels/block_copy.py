"""Copies of KV blocks, all layers at once, between the device's cache and a pool in host memory (KV offload).

A pool is [slots, layers, 2, ...]: a block's data of all layers is contiguous there, and moves in one copy.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

if torch.cuda.is_available():
    from quire_kernels.block_copy_triton import block_copy_triton

Pairs = Sequence[tuple[int, int]]
_STAGING_BYTES = 64 << 20  # temporary buffer on the device


def host_pool(caches: Sequence[Tensor], slots: int, memory: Tensor | None = None) -> Tensor:
    """A pool for blocks of ``caches``, [2, num_blocks, ...] each: of zeros, in pinned memory for a GPU, or in
    ``memory`` u8, which may be larger.
    """
    first = caches[0]
    shape = (slots, len(caches), 2, *first.shape[2:])
    if memory is None:
        return torch.zeros(shape, dtype=first.dtype, pin_memory=first.is_cuda)
    return memory[: math.prod(shape) * first.dtype.itemsize].view(first.dtype).view(shape)


def device_bytes(block_bytes: int) -> int:
    """Memory of a GPU that its copies of blocks need for a moment."""
    return max(block_bytes, _STAGING_BYTES)


def save_blocks(caches: Sequence[Tensor], pool: Tensor, pairs: Pairs) -> None:
    """Copy blocks to the pool; ``pairs`` are (block, slot). The copies are complete on return."""
    if not caches[0].is_cuda:
        _copy(_parts(caches), _pool_parts(pool), pairs)
        return
    for some in _staged(pool, pairs):
        staging = torch.empty(len(some), *pool.shape[1:], dtype=pool.dtype, device=caches[0].device)
        _copy(_parts(caches), _pool_parts(staging), [(block, at) for at, (block, _) in enumerate(some)])
        for at, (_, slot) in enumerate(some):
            pool[slot].copy_(staging[at], non_blocking=True)
    torch.cuda.current_stream(caches[0].device).synchronize()


def load_blocks(pool: Tensor, caches: Sequence[Tensor], pairs: Pairs) -> None:
    """Copy blocks from the pool; ``pairs`` are (slot, block). The pool may be overwritten on return."""
    if not caches[0].is_cuda:
        _copy(_pool_parts(pool), _parts(caches), pairs)
        return
    for some in _staged(pool, pairs):
        staging = torch.empty(len(some), *pool.shape[1:], dtype=pool.dtype, device=caches[0].device)
        for at, (slot, _) in enumerate(some):
            staging[at].copy_(pool[slot], non_blocking=True)
        _copy(_pool_parts(staging), _parts(caches), [(at, block) for at, (_, block) in enumerate(some)])
    torch.cuda.current_stream(caches[0].device).synchronize()


def _staged(pool: Tensor, pairs: Pairs) -> list[Pairs]:
    at_once = max(1, _STAGING_BYTES // pool[0].nbytes)
    return [pairs[first : first + at_once] for first in range(0, len(pairs), at_once)]


def _parts(caches: Sequence[Tensor]) -> list[Tensor]:
    """Keys and values of each layer, [num_blocks, ...] each."""
    return [half for cache in caches for half in cache.unbind(0)]


def _pool_parts(pool: Tensor) -> list[Tensor]:
    return list(pool.flatten(1, 2).unbind(1))


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Pairs) -> None:
    if not pairs:
        return
    if sources[0].is_cuda:
        block_copy_triton(sources, targets, pairs)
        return
    taken, given = (torch.tensor(side) for side in zip(*pairs, strict=True))
    for source, target in zip(sources, targets, strict=True):
        target[given] = source[taken]


def block_copy_reference(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Pairs) -> None:
    """One block at a time."""
    for source, target in zip(sources, targets, strict=True):
        for taken, given in pairs:
            target[given] = source[taken]
