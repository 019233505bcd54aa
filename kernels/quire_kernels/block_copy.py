"""Copies of KV blocks, all layers at once: between the cache and a pool in host memory on a CPU, between the
cache and a buffer in its own memory on a GPU (KV offload).

A pool, or a buffer, is [slots, layers, 2, ...]: a block's data of all layers is contiguous there, and moves
in one copy.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

if torch.cuda.is_available():
    from quire_kernels.block_copy_triton import block_copy_triton

Pairs = Sequence[tuple[int, int]]


def host_pool(caches: Sequence[Tensor], slots: int, memory: Tensor | None = None) -> Tensor:
    """A pool for blocks of ``caches``, [2, num_blocks, ...] each: of zeros, in pinned memory for a GPU, or in
    ``memory`` u8, which may be larger.
    """
    first = caches[0]
    shape = (slots, len(caches), 2, *first.shape[2:])
    if memory is None:
        return torch.zeros(shape, dtype=first.dtype, pin_memory=first.is_cuda)
    return memory[: math.prod(shape) * first.dtype.itemsize].view(first.dtype).view(shape)


def save_blocks(caches: Sequence[Tensor], pool: Tensor, pairs: Pairs) -> None:
    """On a CPU: copy blocks to the pool; ``pairs`` are (block, slot)."""
    _copy(_parts(caches), _pool_parts(pool), pairs)


def load_blocks(pool: Tensor, caches: Sequence[Tensor], pairs: Pairs) -> None:
    """On a CPU: copy blocks from the pool; ``pairs`` are (slot, block)."""
    _copy(_pool_parts(pool), _parts(caches), pairs)


class BlockBuffer:
    """A buffer on a GPU into which blocks of ``caches`` are gathered, and from which they are scattered, by
    one launch each. ``data`` [slots, layers, 2, ...].
    """

    def __init__(self, caches: Sequence[Tensor], slots: int) -> None:
        first = caches[0]
        self.data = torch.empty(
            slots, len(caches), 2, *first.shape[2:], dtype=first.dtype, device=first.device
        )
        self._parts, self._own = _parts(caches), _pool_parts(self.data)
        # Made once: they are copied from memory that is not pinned.
        self._tables = _addresses(self._parts), _addresses(self._own)

    def gather(self, pairs: Tensor) -> None:
        """i64 [N, 2] on the device: (block, slot)."""
        self._move(self._parts, self._own, pairs, self._tables)

    def scatter(self, pairs: Tensor) -> None:
        """i64 [N, 2] on the device: (slot, block)."""
        self._move(self._own, self._parts, pairs, self._tables[::-1])

    def _move(
        self, sources: list[Tensor], targets: list[Tensor], pairs: Tensor, tables: tuple[Tensor, Tensor]
    ) -> None:
        """``tables``: the addresses of the sources and of the targets."""
        if pairs.is_cuda:
            block_copy_triton(sources, targets, pairs, tables)
        else:
            _copy(sources, targets, pairs.tolist())


def _parts(caches: Sequence[Tensor]) -> list[Tensor]:
    """Keys and values of each layer, [num_blocks, ...] each."""
    return [half for cache in caches for half in cache.unbind(0)]


def _addresses(parts: Sequence[Tensor]) -> Tensor:
    """i64 [len(parts)], on their device."""
    return torch.tensor([part.data_ptr() for part in parts], device=parts[0].device)


def _pool_parts(pool: Tensor) -> list[Tensor]:
    return list(pool.flatten(1, 2).unbind(1))


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Pairs) -> None:
    if not pairs:
        return
    taken, given = (torch.tensor(side) for side in zip(*pairs, strict=True))
    for source, target in zip(sources, targets, strict=True):
        target[given] = source[taken]


def block_copy_reference(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Pairs) -> None:
    """One block at a time."""
    for source, target in zip(sources, targets, strict=True):
        for taken, given in pairs:
            target[given] = source[taken]
