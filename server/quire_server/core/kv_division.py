"""How the ranks of a server divide its KV blocks: layers among stages, KV heads among the ranks of a stage.

A block has one order of bytes that does not depend on the number of ranks: layer after layer, keys before
values, head after head. Parts are named by layer and head of the model, never by their position in a rank's
memory, which is another one on each server. Where there are more ranks than heads a head is on several of
them. Block ids are the same on all ranks. Knows no tensors or sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from quire_server.core.topology import Range, Topology

_ALIGNMENT = 4096  # of each rank's memory: no page is of two ranks


class Run(NamedTuple):
    """A part of every block that is in one piece: block ``b`` has its ``size`` bytes at offset + b * step."""

    offset: int
    step: int
    size: int

    def at(self, block_id: int) -> slice:
        """Of one block."""
        first = self.offset + block_id * self.step
        return slice(first, first + self.size)


@dataclass(frozen=True, slots=True)
class KVDivision:
    """``tensor`` ranks in each stage, and the layers of each stage. Ranks are numbered stage by stage."""

    num_kv_heads: int
    tensor: int
    stages: tuple[Range, ...]

    @property
    def num_ranks(self) -> int:
        """All ranks of the server."""
        return self.tensor * len(self.stages)

    @property
    def num_layers(self) -> int:
        """All layers of the model."""
        return self.stages[-1].stop

    @property
    def heads_of_rank(self) -> int:
        """The number of KV heads that each rank has."""
        return self.heads(0).size

    def layers(self, rank: int) -> Range:
        """The layers of a rank."""
        return self.stages[rank // self.tensor]

    def heads(self, rank: int) -> Range:
        """The KV heads of a rank, by their number in the model."""
        return Topology(self.tensor, rank=rank % self.tensor).kv_heads(self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class KVMemory:
    """Where the KV blocks of all ranks are in one file: rank after rank, in it layer after layer, keys before
    values, block after block, head after head. ``head_bytes``: of one head's keys, or values, in one block.
    ``is_pool``: each rank's part of a block is in one piece, as copies of a device's blocks are.
    """

    division: KVDivision
    num_blocks: int
    head_bytes: int
    is_pool: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, each head counted once."""
        return 2 * self.division.num_layers * self.division.num_kv_heads * self.head_bytes

    @property
    def size(self) -> int:
        """Bytes of all ranks."""
        return self.start(self.division.num_ranks)

    def start(self, rank: int) -> int:
        """The offset of a rank's memory."""
        sizes = (self.division.layers(each).size * self._layer_bytes for each in range(rank))
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)

    def runs(self) -> tuple[Run, ...]:
        """The parts of a block, in the order of its bytes; of a head on several ranks that of the lowest."""
        found: list[Run] = []
        for run, *_ in self._places():
            last = found[-1] if found else None
            if last is not None and (last.offset + last.size, last.step) == (run.offset, run.step):
                found[-1] = last._replace(size=last.size + run.size)
            else:
                found.append(run)
        return tuple(found)

    def copies(self) -> tuple[tuple[Run, tuple[Run, ...]], ...]:
        """Parts that are on several ranks: that of the lowest one, and those of the others."""
        return tuple((first, tuple(others)) for first, *others in self._places() if others)

    @property
    def _layer_bytes(self) -> int:
        return 2 * self.num_blocks * self.division.heads_of_rank * self.head_bytes

    def _places(self) -> Iterator[list[Run]]:
        """For the parts of a block, in the order of its bytes, where each of them is."""
        division, heads = self.division, self.division.heads_of_rank
        size = heads * self.head_bytes
        for stage, layers in enumerate(division.stages):
            ranks = range(stage * division.tensor, (stage + 1) * division.tensor)
            step, distance = size, self.num_blocks * size
            if self.is_pool:
                step, distance = 2 * layers.size * size, size
            for number in range(2 * layers.size):  # keys and values of each layer
                for head in range(0, division.num_kv_heads, heads):
                    yield [
                        Run(self.start(rank) + number * distance, step, size)
                        for rank in ranks
                        if division.heads(rank).start == head
                    ]
