"""Communicators: what the ranks of a distributed model exchange in the middle of a forward pass.

A layer computes with its rank's part of the weights and calls ``all_reduce`` where the parts have to be
added; which ranks there are, and how they are connected, only the communicator knows. After an
``all_reduce`` every rank holds the same bits: sums are formed in the order of the ranks.
"""

from typing import Protocol

from torch import Tensor


class Communicator(Protocol):
    """The ranks that share a model's layers. Every rank has to make the same calls in the same order."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, which have one shape and dtype. May overwrite the part."""

    def gather_to_leader(self, part: Tensor) -> Tensor:
        """On rank 0, all ranks' parts [..., n], which have one shape, side by side: [..., ranks * n]. On
        other ranks the part itself.
        """


class SingleRank:
    """One rank has the whole model: nothing is exchanged."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """The part is the sum."""
        return part

    def gather_to_leader(self, part: Tensor) -> Tensor:
        """The part is the whole."""
        return part
