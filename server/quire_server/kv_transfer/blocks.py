"""What a transfer needs to know of the memory of KV blocks, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire_server.kv_transfer.channel import Pieces


class KVBlocks(Protocol):
    """The KV cache as bytes. A block's pieces are in the same order on every server of one layout."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    @property
    def descriptor(self) -> int | None:
        """Of the file that has all pieces, for another process to read; None where there is none."""

    @property
    def stride(self) -> int:
        """Bytes in that file from a piece of a block to its next one."""

    def pieces(self, block_id: int) -> Pieces:
        """The memory of one block."""

    def clear(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with zeros."""
