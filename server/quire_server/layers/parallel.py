"""Communicators: what the ranks of a distributed model exchange in the middle of a forward pass.

A layer computes with its rank's part of the weights and calls ``all_reduce`` where the parts have to be
added; which ranks there are, and how they are connected, only the communicator knows. After an
``all_reduce`` every rank holds the same bits. The only module that knows ``torch.distributed``.
"""

import atexit
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor, distributed
from torch._C._autograd import DeviceType

from quire_kernels import (
    CollectiveError,
    OneShotPlace,
    can_one_shot,
    largest,
    largest_pair,
    one_shot_all_reduce,
    one_shot_region_bytes,
)
from quire_server.core.topology import Topology
from quire_server.errors import ConfigError
from quire_server.network_interface import interface_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import Work

logger = logging.getLogger(__name__)

__all__ = [
    "DEADLINE",
    "STAGE_DEADLINE",
    "CollectiveError",
    "Communicator",
    "Gloo",
    "GpuStages",
    "Nccl",
    "OneStage",
    "SingleRank",
    "Stages",
    "argmax",
    "check_gpus",
]

#: The port at which ranks of several nodes learn the addresses of gloo and NCCL.
STORE_PORT = 7601
_STORE_SECONDS = 300.0  # for the other ranks, and for the leader's name to resolve

#: Seconds until a rank that does not take part fails the others: shorter than the five after which a stopped
#: rank has to be noticed, and far longer than one layer of a large step. A pause of all ranks does not count.
DEADLINE = 3.0
#: The same for another stage, which may have other passes to compute first, or a long prompt; on GPUs, for
#: which a kernel is compiled when it is first needed; and for gloo, which counts a pause of all ranks as a
#: rank's absence. A rank that stops is noticed sooner, by its beats, and one that ends by its connections.
STAGE_DEADLINE = 300.0


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

    @property
    def waited(self) -> float:
        """Seconds in which calls waited for other ranks on the host."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, which have one shape and dtype. May overwrite the part."""

    def gather_to_leader(self, part: Tensor) -> Tensor:
        """On rank 0, all ranks' parts [..., n], which have one shape, side by side: [..., ranks * n]. On
        other ranks the part itself.
        """

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send to a rank of another stage, and do not wait until it has received. The tensor must not be
        changed afterwards.
        """

    def recv(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        """What a rank of another stage has sent, in the order in which it did."""

    def abort(self) -> None:
        """Leave the ranks: calls of others that wait for this one, and all later calls, are
        CollectiveErrors. By the thread that makes this rank's calls.
        """


def argmax(communicator: Communicator, logits: Tensor, first: int) -> Tensor:
    """f32 [S, 2] on rank 0: the largest logit of each row of all ranks' [S, n], NaN if there is one, and its
    number, the smallest of equals; on other ranks those of their own. ``first``: number of this rank's first
    logit. Moves 8 bytes for each row and rank.
    """
    return largest_pair(communicator.gather_to_leader(largest(logits, first)))


class OneStage:
    """The part of a communicator that ranks which share all layers do not need."""

    def send(self, tensor: Tensor, rank: int) -> NoReturn:
        """There is no other stage."""
        raise AssertionError(f"one stage sends to rank {rank}")

    def recv(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> NoReturn:
        """There is no other stage."""
        raise AssertionError(f"one stage receives from rank {rank}")


class SingleRank(OneStage):
    """One rank has whole layers: nothing of them is exchanged."""

    calls = bytes = 0
    waited = 0.0

    def all_reduce(self, part: Tensor) -> Tensor:
        """The part is the sum."""
        return part

    def gather_to_leader(self, part: Tensor) -> Tensor:
        """The part is the whole."""
        return part

    def abort(self) -> None:
        """No rank waits for this one."""


@dataclass(frozen=True)
class Meeting:
    """Where ranks find each other: by files in a ``directory`` that they share, over the loopback interface,
    so that nothing listens on others. Those of several nodes listen on the ``address`` of their pod, where
    gloo and NCCL let everyone in: a NetworkPolicy has to keep others away. They ask the ``leader`` for each
    other's addresses; on the leader that is empty.
    """

    directory: Path
    address: str = ""
    leader: str = ""

    def store(self, name: str, size: int) -> Any:
        """Where so many ranks publish their addresses for one another. ``name``: of the connections."""
        if not self.address:
            path = str(self.directory / name)
            return distributed.FileStore(path, size)  # type: ignore[attr-defined]  # not in the stubs
        return distributed.PrefixStore(name, self._store)  # type: ignore[attr-defined]  # not in the stubs

    @cached_property
    def _store(self) -> Any:
        """The leader's has a socket of its own, or torch would listen on all interfaces."""
        tcp_store = partial(
            distributed.TCPStore,  # type: ignore[attr-defined]  # not in the stubs
            port=STORE_PORT,
            timeout=timedelta(seconds=_STORE_SECONDS),
            wait_for_workers=False,
            use_libuv=True,
        )
        if self.leader:
            return tcp_store(self.leader, is_master=False)
        try:
            listener = socket.create_server((self.address, STORE_PORT))
        except OSError as error:
            raise ConfigError(
                f"Ranks of other nodes find each other at {self.address}, port {STORE_PORT}, which cannot be "
                f"listened on: {error.strerror}. Free the port."
            ) from error
        return tcp_store(self.address, is_master=True, master_listen_fd=listener.detach())

    def nccl_environ(self) -> dict[str, str]:
        """By which NCCL, which takes the name of an interface, listens where gloo does."""
        if not self.address:
            return {"NCCL_SOCKET_IFNAME": "=lo"}
        name, family = interface_of(self.address)
        return {"NCCL_SOCKET_IFNAME": f"={name}", "NCCL_SOCKET_FAMILY": family.name}


class _ProcessGroup(OneStage):
    """Exchanges of the ranks of one stage by a process group of torch. ``_error``: what it raises if one of
    them is missing.
    """

    _error: type[Exception] = RuntimeError

    def __init__(self, group: Any, topology: Topology, *wait_for: timedelta) -> None:
        """``wait_for``: how long each call waits; nothing: the device waits, and the host goes on."""
        self._group, self._wait_for = group, wait_for
        self._ranks, self._is_leader = topology.tensor, topology.tensor_rank == 0
        self._to_leader = torch._C._distributed_c10d.GatherOptions()
        self._to_leader.rootRank = 0
        self.calls = self.bytes = 0
        self.waited = 0.0

    def all_reduce(self, part: Tensor) -> Tensor:
        """As in ``Communicator``."""
        part = self._given(part)
        self._make(lambda group: group.allreduce([part]), part)
        return part

    def gather_to_leader(self, part: Tensor) -> Tensor:
        """As in ``Communicator``."""
        part = self._given(part)
        parts = [torch.empty_like(part) for _ in range(self._ranks)] if self._is_leader else []
        self._make(lambda group: group.gather([parts] if parts else [], [part], self._to_leader), part)
        return torch.cat(parts, -1) if parts else part

    def _given(self, part: Tensor) -> Tensor:
        """Contiguous: what a call reads and may write."""
        return part.contiguous()

    def _make(self, start: Callable[[Any], "Work"], part: Tensor) -> None:
        self._count(part)
        began_at = time.perf_counter()
        with _joined(self._group, self._error) as group:
            start(group).wait(*self._wait_for)
        self.waited += time.perf_counter() - began_at

    def _count(self, part: Tensor) -> None:
        self.calls += 1
        self.bytes += part.nbytes


class Gloo(_ProcessGroup):
    """Ranks on CPUs, connected by gloo. Some hundred microseconds a call: the reference, and what there is
    where ranks cannot share memory.
    """

    def __init__(self, topology: Topology, meeting: Meeting, *, deadline: float = STAGE_DEADLINE) -> None:
        """Join the ranks of the same stage. All of them have to do so within the deadline."""
        timeout = timedelta(seconds=deadline)
        name = f"gloo-{topology.stage}"
        group = _join_gloo(meeting, name, topology.tensor_rank, topology.tensor, timeout)
        super().__init__(group, topology, timeout)

    def _given(self, part: Tensor) -> Tensor:
        """A copy: a computation by torch, which ends a recording. Gloo's exchanges cannot be part of one, and
        torch does not notice them.
        """
        return part.clone(memory_format=torch.contiguous_format)

    def abort(self) -> None:
        """As in ``Communicator``, by closing the connections: gloo cannot end calls of its own process."""
        self._group = None


class Nccl(_ProcessGroup):
    """Ranks on GPUs that share layers, each a process with a GPU of its own. Small sums are made by one
    kernel over memory that the GPUs share, where all are on one host and NVLink connects them; NCCL makes all
    others.

    A call is queued on the device's stream, may be captured in a CUDA graph, and never waits on the host: who
    waits for the device's results has the deadline (``Device.finish``, and rank 0 for the echo of a step).
    """

    _error = distributed.DistBackendError  # other errors are the device's

    def __init__(self, group: Any, topology: Topology, one_shot: OneShotPlace | None) -> None:
        super().__init__(group, topology)
        self._topology, self._one_shot = topology, one_shot

    @property
    def has_one_shot(self) -> bool:
        """Whether small sums are made by one kernel."""
        return self._one_shot is not None

    def without_one_shot(self) -> "Nccl":
        """The same ranks, by NCCL alone."""
        return Nccl(self._group, self._topology, None)

    @classmethod
    def join(cls, topology: Topology, meeting: Meeting, device: torch.device) -> "Nccl":
        """Join, and make each kind of call once: NCCL connects when it is first used, which must not happen
        while a graph is captured.
        """
        store = meeting.store(f"nccl-{topology.stage}", topology.tensor)
        group = _join_nccl(store, meeting, topology.tensor_rank, topology.tensor, device)
        made = cls(group, topology, None)
        made._use_once(device)
        gpus = topology.stage_on_node
        if gpus is not None and _are_linked(gpus):
            made._one_shot = made._agreed(_share_memory(topology, store, device), device)
        # No rank may see another one's flags before they are zero: a sum by NCCL is between.
        made._use_once(device)
        made.calls = made.bytes = 0
        # A communicator that is destroyed waits for its peers, and one of them may be dead.
        atexit.register(made.abort)
        return made

    def all_reduce(self, part: Tensor) -> Tensor:
        """As in ``Communicator``."""
        if self._one_shot is None or not can_one_shot(part):
            return super().all_reduce(part)
        self._count(part)
        return one_shot_all_reduce(part, self._one_shot)

    def abort(self) -> None:
        """As in ``Communicator``. What the calls that waited give means nothing."""
        try:
            if self._one_shot is not None:
                self._one_shot.release()
        finally:
            self._group.abort()

    def _use_once(self, device: torch.device) -> None:
        self.gather_to_leader(self.all_reduce(torch.zeros(1, 8, device=device)))
        torch.cuda.synchronize(device)

    def _agreed(self, place: OneShotPlace | None, device: torch.device) -> OneShotPlace | None:
        """The place, if every rank has one."""
        count = self.all_reduce(torch.tensor([float(place is not None)], device=device))
        return place if int(count) == self._ranks else None


#: Torch's watchdog, which ends processes that wait for long or are idle, is off: rank 0 and the supervisor
#: notice a rank that is lost, and sooner.
_NO_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def check_gpus(topology: Topology, meeting: Meeting, device: torch.device) -> None:
    """Raises ConfigError, on all ranks alike, where those of another node have GPUs of another kind. Those of
    one node are compared before ranks meet.
    """
    if topology.nodes == 1:
        return
    store, ranks = meeting.store("gpus", topology.size), range(topology.size)
    major, minor = torch.cuda.get_device_capability(device)
    store.set(str(topology.rank), f"{major}.{minor} on {socket.gethostname()}")
    found = [store.get(str(rank)).decode() for rank in ranks]
    store.set(f"compared by {topology.rank}", "")
    if topology.is_leader:  # which has the store, and may end now
        store.wait([f"compared by {rank}" for rank in ranks])
    if len({one.partition(" ")[0] for one in found}) > 1:
        kinds = " and ".join(dict.fromkeys(found))
        raise ConfigError(
            f"The GPUs have the compute capabilities {kinds}, and ranks must compute alike: give all nodes "
            "of the group GPUs of one kind."
        )


def _join_nccl(store: Any, meeting: Meeting, rank: int, size: int, device: torch.device) -> Any:
    os.environ.update(_NO_WATCHDOG | meeting.nccl_environ())
    torch.cuda.set_device(device)
    options = distributed.ProcessGroupNCCL.Options()
    return distributed.ProcessGroupNCCL(store, rank, size, options)


def _are_linked(gpus: Sequence[int]) -> bool:
    """Whether NVLink connects each of the GPUs with each other one. The kernel's flags are set by atomic
    operations on another GPU's memory, which PCI Express does not have.
    """
    detect = torch._C._distributed_c10d._detect_dma_connectivity  # type: ignore[attr-defined]  # not in the stubs
    links = detect(DeviceType.CUDA, "nvlink").matrix
    pairs = [(one, other) for one in gpus for other in gpus if one != other]
    return all(links[one][other] and torch.cuda.can_device_access_peer(one, other) for one, other in pairs)


def _share_memory(topology: Topology, store: "Store", device: torch.device) -> OneShotPlace | None:
    """Allocate this rank's region, and map those of the others. Called by all ranks. None: the driver or the
    container does not allow it, and NCCL makes all sums.
    """
    symmetric = torch._C._distributed_c10d._SymmetricMemory
    names = torch._C._distributed_c10d.PrefixStore("one-shot", store)
    symmetric.set_group_info("ranks", topology.tensor_rank, topology.tensor, names)
    try:
        region = symmetric.empty_strided_p2p(
            (one_shot_region_bytes(topology.tensor),), (1,), torch.uint8, device, "ranks"
        )
        region.zero_()
        torch.cuda.synchronize(device)
        shared = symmetric.rendezvous(region, "ranks")
    except RuntimeError as error:
        logger.warning("GPUs share no memory for small sums", extra={"why": str(error)})
        return None
    return OneShotPlace.of(shared.buffer_ptrs, topology.tensor_rank, region, keeps=shared)


class Stages:
    """All ranks of a pipeline: those of each stage connected as ``of_stage`` is, stages by gloo, which takes
    some hundred microseconds for each border and step.
    """

    def __init__(
        self,
        of_stage: Communicator,
        topology: Topology,
        meeting: Meeting,
        *,
        deadline: float = STAGE_DEADLINE,
    ) -> None:
        """Join. All ranks have to do so within the deadline of a pass."""
        self._of_stage = of_stage
        self._timeout = timedelta(seconds=deadline)
        self._group = _join_gloo(meeting, "gloo-all", topology.rank, topology.size, self._timeout)
        self._sending: list[tuple[Work, Tensor]] = []  # tensors are kept until they are sent
        self._calls = self._bytes = 0
        self._waited = 0.0

    @property
    def calls(self) -> int:
        """Calls that were made, within the stage and between stages."""
        return self._calls + self._of_stage.calls

    @property
    def bytes(self) -> int:
        """Bytes of what this rank has given and received."""
        return self._bytes + self._of_stage.bytes

    @property
    def waited(self) -> float:
        """Seconds in which calls waited for ranks of this stage and of others."""
        return self._waited + self._of_stage.waited

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of the parts of this stage's ranks."""
        return self._of_stage.all_reduce(part)

    def gather_to_leader(self, part: Tensor) -> Tensor:
        """The parts of this stage's ranks, on its first one."""
        return self._of_stage.gather_to_leader(part)

    def send(self, tensor: Tensor, rank: int) -> None:
        """As in ``Communicator``."""
        tensor = tensor.contiguous()
        with _joined(self._group) as group:
            self._keep(group.send([tensor], rank, 0), tensor)

    def _keep(self, work: "Work", tensor: Tensor) -> None:
        """Until it is sent."""
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        self._sending.append((work, tensor))
        self._count(tensor)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        """As in ``Communicator``."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        began_at = time.perf_counter()
        with _joined(self._group) as group:
            group.recv([tensor], rank, 0).wait(self._timeout)
        self._waited += time.perf_counter() - began_at
        self._count(tensor)
        return tensor

    def abort(self) -> None:
        """Leave the ranks of this stage and those of the others."""
        self._of_stage.abort()
        self._sending.clear()
        self._group = None

    def _count(self, tensor: Tensor) -> None:
        self._calls += 1
        self._bytes += tensor.nbytes


class GpuStages(Stages):
    """Stages on GPUs: hidden states go from GPU to GPU by NCCL, queued on the device's stream.
    What returns to rank 0, which samples, goes through the hosts. So no GPU waits for a later stage's, and
    GPUs never wait in a circle, whatever else makes one of them wait for all that it has queued.
    """

    def __init__(
        self, of_stage: Communicator, topology: Topology, meeting: Meeting, device: torch.device
    ) -> None:
        """Join, and use each connection once: NCCL connects two ranks when they first exchange something."""
        super().__init__(of_stage, topology, meeting)
        self._topology, self._device = topology, device
        store = meeting.store("nccl-stages", topology.size)
        self._states: Any = _join_nccl(store, meeting, topology.rank, topology.size, device)
        # A communicator that is destroyed waits for its peers, and one of them may be dead.
        atexit.register(self.abort)
        part = torch.zeros(1, 8, device=device)
        if not topology.is_first_stage:
            self.recv(part.shape, part.dtype, topology.previous)
        if not topology.is_last_stage:
            self.send(part, topology.next)
        torch.cuda.synchronize(device)
        self._calls = self._bytes = 0

    def send(self, tensor: Tensor, rank: int) -> None:
        """As in ``Communicator``. Logits for rank 0 are waited for and copied to the host."""
        if rank < self._topology.rank:
            super().send(tensor.cpu(), rank)
            return
        with _joined(self._states, distributed.DistBackendError) as group:
            self._keep(group.send([tensor], rank, 0), tensor)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        """As in ``Communicator``: states on the device, whose stream waits for them, logits on the host."""
        if rank > self._topology.rank:
            return super().recv(shape, dtype, rank)
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        with _joined(self._states, distributed.DistBackendError) as group:
            group.recv([tensor], rank, 0).wait()
        self._count(tensor)
        return tensor

    def abort(self) -> None:
        """As in ``Communicator``. What the calls that waited give means nothing."""
        if self._states is not None:
            self._states.abort()
        self._states = None
        super().abort()


def _join_gloo(meeting: Meeting, name: str, rank: int, size: int, timeout: timedelta) -> Any:
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    options._timeout = timeout
    own = meeting.address or "127.0.0.1"
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=own)]
    return distributed.ProcessGroupGloo(meeting.store(name, size), rank, size, options)


@contextmanager
def _joined(group: Any, kind: type[Exception] = RuntimeError) -> Iterator[Any]:
    """The group, None where this rank has left it. An error of this kind is another rank's end, or its
    absence: with gloo each one.
    """
    if group is None:
        raise CollectiveError("This rank has left the others.")
    try:
        yield group
    except kind as error:
        raise CollectiveError(f"Another rank did not take part in an exchange: {error}") from None
