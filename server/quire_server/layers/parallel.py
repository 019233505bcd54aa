"""Communicators: what the ranks of a distributed model exchange in the middle of a forward pass.

A layer computes with its rank's part of the weights and calls ``all_reduce`` where the parts have to be
added; which ranks there are, and how they are connected, only the communicator knows. After an
``all_reduce`` every rank holds the same bits. The only module that knows ``torch.distributed``.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, distributed

from quire_kernels import CollectiveError
from quire_server.core.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import Work

__all__ = ["DEADLINE", "CollectiveError", "Communicator", "Gloo", "SingleRank"]

#: Seconds until a rank that does not take part fails the others: shorter than the five after which a stopped
#: rank has to be noticed, and far longer than one layer of a large step.
DEADLINE = 3.0


class Communicator(Protocol):
    """The ranks that share a model's layers. Every rank has to make the same calls in the same order; a call
    that another rank does not take part in is a CollectiveError.
    """

    @property
    def calls(self) -> int:
        """Calls that were made."""

    @property
    def bytes(self) -> int:
        """Bytes of the parts that this rank has given."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, which have one shape and dtype. May overwrite the part."""

    def gather_to_leader(self, part: Tensor) -> Tensor:
        """On rank 0, all ranks' parts [..., n], which have one shape, side by side: [..., ranks * n]. On
        other ranks the part itself.
        """


class SingleRank:
    """One rank has the whole model: nothing is exchanged."""

    calls = bytes = 0

    def all_reduce(self, part: Tensor) -> Tensor:
        """The part is the sum."""
        return part

    def gather_to_leader(self, part: Tensor) -> Tensor:
        """The part is the whole."""
        return part


class Gloo:
    """Ranks on CPUs, connected by gloo over the loopback interface. Some hundred microseconds a call: the
    reference, and what there is where ranks cannot share memory.

    Ranks find each other by a file in a directory that they share, so nothing listens on other interfaces.
    """

    def __init__(self, topology: Topology, directory: Path, *, deadline: float = DEADLINE) -> None:
        """Join. All ranks have to do so within the deadline."""
        self._ranks, self._is_leader = topology.tensor, topology.is_leader
        self._timeout = timedelta(seconds=deadline)
        self.calls = self.bytes = 0
        options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
        options._timeout = self._timeout
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        path = str(directory / "gloo")
        store = distributed.FileStore(path, topology.tensor)  # type: ignore[attr-defined]  # not in the stubs
        self._group: Any = distributed.ProcessGroupGloo(store, topology.rank, topology.tensor, options)
        self._to_leader = torch._C._distributed_c10d.GatherOptions()
        self._to_leader.rootRank = 0

    def all_reduce(self, part: Tensor) -> Tensor:
        """As in ``Communicator``."""
        part = part.contiguous()
        self._wait(lambda: self._group.allreduce([part]), part)
        return part

    def gather_to_leader(self, part: Tensor) -> Tensor:
        """As in ``Communicator``."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self._ranks)] if self._is_leader else []
        self._wait(lambda: self._group.gather([parts] if parts else [], [part], self._to_leader), part)
        return torch.cat(parts, -1) if parts else part

    def _wait(self, start: Callable[[], "Work"], part: Tensor) -> None:
        self.calls += 1
        self.bytes += part.nbytes
        try:
            start().wait(self._timeout)
        except RuntimeError as error:
            raise CollectiveError(f"Another rank did not take part in an exchange: {error}") from None
