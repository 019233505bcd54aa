"""Topology: how many ranks compute one model, and which part of it each of them owns.

Tensor parallelism splits every layer (Megatron-LM, arXiv:1909.08053): attention by heads, feed-forward by its
inner dimension, experts whole, embedding and head by the vocabulary. Ranks are numbered stage by stage. Pure
arithmetic: knows no tensors, files or processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_PADDED_TO = 16


class Range(NamedTuple):
    """The half-open range [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a checkpoint tensor that a rank reads: ``ranges`` of one dimension, joined."""

    dimension: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """``tensor`` ranks share each layer; ``rank`` is this process."""

    tensor: int = 1
    rank: int = 0

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides and samples: rank 0."""
        return self.rank == 0

    def part(self, total: int) -> Range:
        """This rank's part of a dimension that the ranks divide evenly."""
        each = total // self.tensor
        return Range(self.rank * each, (self.rank + 1) * each)

    def kv_heads(self, total: int) -> Range:
        """This rank's key and value heads: an even part, or one head that several ranks have."""
        if total >= self.tensor:
            return self.part(total)
        head = self.rank * total // self.tensor
        return Range(head, head + 1)

    def padded_part(self, total: int) -> int:
        """The size of every rank's part of a dimension that is padded at its end: whole groups of the rows
        that the CPU's kernel for int8 computes at once. One rank has no padding.
        """
        if self.tensor == 1:
            return total
        return -(-total // (self.tensor * _PADDED_TO)) * _PADDED_TO


def tensor_sizes(num_heads: int, num_kv_heads: int, dimensions: Sequence[int]) -> tuple[int, ...]:
    """The numbers of ranks that divide a model: its query heads, its key and value heads (or each of these is
    on equally many ranks), and the ``dimensions``: inner sizes of feed-forwards, numbers of experts.
    """
    return tuple(
        size
        for size in range(1, num_heads + 1)
        if not num_heads % size
        and (not num_kv_heads % size or not size % num_kv_heads)
        and not any(dimension % size for dimension in dimensions)
    )
