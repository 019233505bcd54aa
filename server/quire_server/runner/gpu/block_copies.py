"""Copies KV blocks between a GPU's cache and pinned memory of the host, beside the steps.

The stream of the steps only gathers blocks into a buffer on the GPU, or scatters them from there; between the
buffer and the host a second stream copies. So a block may be overwritten by the step that saves it, and the
forward pass does not wait for what it does not read. Two buffers alternate: where more blocks are copied than
fit, gathering waits for the copies before. It knows no slots' contents and no checksums.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from quire_server.layers.ops import BlockBuffer
from quire_server.runner.gpu.device import BesideCopy, Device

_BUFFERS, _BUFFER_BYTES = 2, 32 << 20

Pairs = Sequence[tuple[int, int]]


def device_bytes(block_bytes: int) -> int:
    """Memory of the GPU that the buffers take."""
    return _BUFFERS * _slots(block_bytes) * block_bytes


def _slots(block_bytes: int) -> int:
    return max(1, _BUFFER_BYTES // block_bytes)


class BlockCopies:
    """Between ``caches``, [2, num_blocks, ...] of each layer, and a ``pool`` of pinned memory."""

    def __init__(self, caches: Sequence[Tensor], pool: Tensor, device: Device) -> None:
        self._pool, self._device = pool, device
        self._buffers = [BlockBuffer(caches, _slots(pool[0].nbytes)) for _ in range(_BUFFERS)]
        self._copies: list[BesideCopy | None] = [None] * _BUFFERS  # the newest one of each buffer
        self._next = 0

    def save(self, pairs: Pairs) -> list[BesideCopy]:
        """Copy blocks to the pool; ``pairs`` are (block, slot)."""
        made = []
        for buffer, some in self._buffered(pairs):
            places = [(block, at) for at, (block, _) in enumerate(some)]
            buffer.gather(self._device.upload(np.array(places, np.int64)))
            copied = [(self._pool[slot], buffer.data[at]) for at, (_, slot) in enumerate(some)]
            made.append(self._begin(copied))
        return made

    def load(self, pairs: Pairs) -> list[BesideCopy]:
        """Copy blocks from the pool; ``pairs`` are (slot, block). What is queued next reads the blocks; the
        pool may be overwritten when the copies are complete.
        """
        made = []
        for buffer, some in self._buffered(pairs):
            made.append(
                self._begin([(buffer.data[at], self._pool[slot]) for at, (slot, _) in enumerate(some)])
            )
            made[-1].arrive()
            places = [(at, block) for at, (_, block) in enumerate(some)]
            buffer.scatter(self._device.upload(np.array(places, np.int64)))
        return made

    def _buffered(self, pairs: Pairs) -> Iterator[tuple[BlockBuffer, Pairs]]:
        """The pairs in pieces, each with a buffer that nothing queued before the next call reads."""
        size = len(self._buffers[0].data)
        for first in range(0, len(pairs), size):
            if (before := self._copies[self._next]) is not None:
                before.arrive()
            yield self._buffers[self._next], pairs[first : first + size]

    def _begin(self, copied: Sequence[tuple[Tensor, Tensor]]) -> BesideCopy:
        made = self._device.copy_beside(copied)
        self._copies[self._next] = made
        self._next = (self._next + 1) % _BUFFERS
        return made
