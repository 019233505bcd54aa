"""Topology: how many ranks compute one model, and which part of it each of them owns.

Tensor parallelism splits every layer (Megatron-LM, arXiv:1909.08053): attention by heads, feed-forward by its
inner dimension, experts whole, embedding and head by the vocabulary. Pipeline parallelism gives each stage
consecutive layers, the first one the embedding and the last one the head. Ranks are numbered stage by stage.
The ranks of several nodes are spread in their order, equally many on each.
Pure arithmetic: knows no tensors, files or processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_PADDED_TO = 16
MAX_RANKS = 32  # of one model


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
    """``tensor`` ranks share each layer, in each of ``pipeline`` stages; ``rank`` is this process. ``nodes``
    divides the number of ranks.
    """

    tensor: int = 1
    rank: int = 0
    pipeline: int = 1
    nodes: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tensor * self.pipeline

    @property
    def node_size(self) -> int:
        """The number of ranks on each node."""
        return self.size // self.nodes

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its node."""
        return self.rank % self.node_size

    def ranks_of_node(self, node: int) -> range:
        """The ranks on a node."""
        return range(node * self.node_size, (node + 1) * self.node_size)

    @property
    def stage_on_node(self) -> range | None:
        """The numbers on their node of the ranks that share this one's layers; None where they are not all
        on one node.
        """
        first = self.rank - self.tensor_rank
        if first // self.node_size != (first + self.tensor - 1) // self.node_size:
            return None
        return range(first % self.node_size, first % self.node_size + self.tensor)

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides and samples: rank 0."""
        return self.rank == 0

    @property
    def tensor_rank(self) -> int:
        """This rank's number among those that share its layers."""
        return self.rank % self.tensor

    @property
    def stage(self) -> int:
        """The stage that this rank is in."""
        return self.rank // self.tensor

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the head."""
        return self.stage == self.pipeline - 1

    @property
    def previous(self) -> int:
        """The rank whose hidden states this one computes with."""
        return self.rank - self.tensor

    @property
    def next(self) -> int:
        """The rank that computes with this one's hidden states."""
        return self.rank + self.tensor

    @property
    def head_rank(self) -> int:
        """The rank to which the last stage gathers its logits."""
        return self.tensor * (self.pipeline - 1)

    def part(self, total: int) -> Range:
        """This rank's part of a dimension that the ranks divide evenly."""
        each = total // self.tensor
        return Range(self.tensor_rank * each, (self.tensor_rank + 1) * each)

    def kv_heads(self, total: int) -> Range:
        """This rank's key and value heads: an even part, or one head that several ranks have."""
        if total >= self.tensor:
            return self.part(total)
        head = self.tensor_rank * total // self.tensor
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


def stage_layers(layer_bytes: Sequence[int], head_bytes: int, stages: int) -> tuple[Range, ...]:
    """The layers of each stage, at least one. Balanced by the bytes that a step reads, because these are what
    a small step takes time for: the head counts like the layers that are as large, the embedding does not
    count, since a step reads one row of it for each token. ``stages``: at most the number of layers.

    Minimises the sum of squares of the stages' bytes and, among equals, the distance of the borders from
    equal parts.
    """
    starts = list(itertools.accumulate(layer_bytes, initial=0))
    num_layers, total = len(layer_bytes), starts[-1] + head_bytes
    # By number of layers: (squares, distance), and the borders of the stages so far.
    found: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {0: ((0, 0), (0,))}
    for stage in range(1, stages + 1):
        is_last = stage == stages
        ends = [num_layers] if is_last else range(stage, num_layers - stages + stage + 1)
        found = {
            end: min(
                (
                    (
                        squares + (starts[end] - starts[begin] + head_bytes * is_last) ** 2,
                        distance + abs(stages * starts[end] - stage * total) * (not is_last),
                    ),
                    (*borders, end),
                )
                for begin, ((squares, distance), borders) in found.items()
                if begin < end
            )
            for end in ends
        }
    return tuple(itertools.starmap(Range, itertools.pairwise(found[num_layers][1])))
