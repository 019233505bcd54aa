"""What a transfer needs to know of the memory of KV blocks, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire_server.core.kv_division import Run
from quire_server.kv_transfer.channel import Pieces


class KVBlocks(Protocol):
    """The KV cache as bytes. A block's bytes are in the same order on every server of one layout, however
    many pieces they are in.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    @property
    def descriptor(self) -> int | None:
        """Of the file that has all pieces, for another process to read; None where there is none."""

    @property
    def runs(self) -> Sequence[Run]:
        """Where in that file the pieces of a block are."""

    def pieces(self, block_id: int) -> Pieces:
        """The memory of one block, each part of it once."""

    def replicate(self, block_id: int) -> None:
        """Copy what was received to where else the same part is."""

    def clear(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with zeros."""
