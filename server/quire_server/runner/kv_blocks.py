"""The memory of KV blocks as bytes, for transfers between servers. On the host only."""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostKVBlocks:
    """The pieces of each block: keys, then values, layer after layer; in a piece, head after head."""

    def __init__(self, kv_caches: Sequence[Tensor], descriptor: int | None = None) -> None:
        """``kv_caches``: one [2, num_blocks, kv_heads, block_size, head_size] per layer. ``descriptor``: of
        the file that has them one after the other, if there is one.
        """
        self.descriptor = descriptor
        halves = [half for cache in kv_caches for half in cache.unbind(0)]
        self._parts = [half.view(torch.uint8).numpy().data.cast("B") for half in halves]
        self._piece_bytes = halves[0][0].nbytes
        self.stride = halves[0].nbytes
        self.block_bytes = self._piece_bytes * len(halves)

    def pieces(self, block_id: int) -> list[memoryview]:
        """The memory of one block."""
        first = block_id * self._piece_bytes
        return [part[first : first + self._piece_bytes] for part in self._parts]

    def clear(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with zeros. What a transfer left in them may be no numbers, which must not remain
        behind the end of a sequence: attention masks them, but still multiplies by them.
        """
        zeros = bytes(self._piece_bytes)
        for block_id in block_ids:
            for piece in self.pieces(block_id):
                piece[:] = zeros
