"""The communicator of CPU ranks on one host: they exchange their parts through memory that they share.

One process creates the region and hands its descriptor to all ranks, by inheritance or over a unix socket.
It has no name, so nothing of it is left when the ranks have ended, however they end. Calls can be recorded
with the layers around them (``runner.recorded_decode``).
"""

from torch import Tensor

from quire_kernels import (
    ShmGroup,
    create_shm_region,
    has_shm_collectives,
    shm_all_reduce,
    shm_gather,
)
from quire_server.layers.parallel import DEADLINE, OneStage


class SharedMemory(OneStage):
    """A ``Communicator``. A rank that does not arrive in time, makes another call than the others or aborts
    ends the group: all calls of all ranks raise CollectiveError from then on.
    """

    def __init__(self, descriptor: int, rank: int, *, deadline: float = DEADLINE) -> None:
        """Join as this rank. The descriptor may be closed afterwards."""
        self._group = ShmGroup(descriptor, rank, deadline=deadline)

    @staticmethod
    def is_supported() -> bool:
        """Whether this machine has what it takes: the library of CPU kernels."""
        return has_shm_collectives()

    @staticmethod
    def create(ranks: int) -> int:
        """The descriptor of a new region; child processes do not inherit it."""
        return create_shm_region(ranks)

    @property
    def calls(self) -> int:
        """Calls made, those of replayed recordings included."""
        return self._group.calls

    @property
    def bytes(self) -> int:
        """Bytes of the parts that this rank has given."""
        return self._group.bytes

    @property
    def waited(self) -> float:
        """As in ``Communicator``."""
        return self._group.waited

    def all_reduce(self, part: Tensor) -> Tensor:
        """As in ``Communicator``."""
        return shm_all_reduce(self._group, part)

    def gather_to_leader(self, part: Tensor) -> Tensor:
        """As in ``Communicator``."""
        return shm_gather(self._group, part)

    def abort(self) -> None:
        """As in ``Communicator``, from any thread."""
        self._group.abort()
