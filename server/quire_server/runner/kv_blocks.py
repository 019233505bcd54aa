"""The memory of the KV blocks of all ranks as bytes, for transfers between servers. On the host only."""

import mmap
import os
from collections.abc import Sequence

from quire_server.core.kv_division import KVMemory


class HostKVBlocks:
    """KV blocks in a file without a name, which every rank maps and has its part of. Rank 0 reads and writes
    the parts of all of them: no rank computes with a block that is transferred.
    """

    def __init__(self, layout: KVMemory, descriptor: int) -> None:
        """``descriptor``: of the file, which gets its size here."""
        os.ftruncate(descriptor, layout.size)
        self.descriptor, self.layout = descriptor, layout
        self.block_bytes, self.runs, self._copies = layout.block_bytes, layout.runs(), layout.copies()
        self._memory = memoryview(mmap.mmap(descriptor, layout.size))

    def of_rank(self, rank: int) -> memoryview:
        """The memory of one rank."""
        return self._memory[self.layout.start(rank) : self.layout.start(rank + 1)]

    def pieces(self, block_id: int) -> list[memoryview]:
        """The memory of one block, each head once."""
        return [self._memory[run.at(block_id)] for run in self.runs]

    def replicate(self, block_id: int) -> None:
        """Give all ranks that have the same head what was written to ``pieces``."""
        for first, others in self._copies:
            for each in others:
                self._memory[each.at(block_id)] = self._memory[first.at(block_id)]

    def clear(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with zeros. What a transfer left in them may be no numbers, which must not remain
        behind the end of a sequence: attention masks them, but still multiplies by them.
        """
        for block_id in block_ids:
            for piece in self.pieces(block_id):
                piece[:] = bytes(piece.nbytes)
            self.replicate(block_id)
