"""The ranks of one model, as the runner sees them: which one this is, and how it reaches the others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire_server.core.rank_step import NO_WORK, AdapterReport, RankStep, Work
from quire_server.core.step import CopyOutcome
from quire_server.core.topology import Topology
from quire_server.layers.parallel import Communicator, SingleRank


@dataclass(frozen=True, slots=True)
class Membership:
    """A rank's place among the ranks of a model. ``agree_on_blocks``: from the number of KV blocks that this
    rank has room for to the number that all ranks have, and from the descriptor of the memory that rank 0 has
    for the blocks of all of them, if it has one, to a descriptor of it here.
    """

    topology: Topology
    communicator: Communicator
    agree_on_blocks: Callable[[int, int | None], tuple[int, int | None]]


#: One rank has the whole model.
SINGLE = Membership(Topology(), SingleRank(), lambda num_blocks, shared: (num_blocks, shared))


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """How a pass ended on the other ranks."""

    is_out_of_memory: bool = False
    copied: tuple[CopyOutcome, ...] = ()  # of each of them that has one
    adapters: tuple[tuple[int, AdapterReport], ...] = ()  # what they have read, with their numbers


class Followers(Protocol):
    """The other ranks, from rank 0."""

    def send(self, message: RankStep) -> None:
        """Send them the next pass."""

    def collect(
        self, *, is_lost: bool = False, has_output: bool = False, work: Work = NO_WORK
    ) -> PassOutcome:
        """Wait until all of them have executed it. Raises RankLostError, which names those that have not.
        ``is_lost``: one of them did not take part in an exchange, so that not much is left to wait for.
        ``has_output``: the last stage has computed the pass, and so have all before it. ``work``: of rank 0.
        """
