"""All-reduce and gather among processes of one host, through memory that they share.

For messages as small as a decode step's a socket costs more than the step's matrix products. A group fails as
a whole: a rank that does not arrive in time ends it, and no rank can join it again. Needs the library of CPU
kernels, on any CPU that it is built for; knows nothing of who starts the processes.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels.cpu.collectives import COLLECTIVES, Collectives
from quire_kernels.cpu.shm_group import SLOT_BYTES, Group

_MAX_RANKS = 64
_DTYPES = (torch.float32, torch.bfloat16)


def create_shm_region(ranks: int) -> int:
    """The descriptor of memory for a group of ranks. It has no name, and is gone when none has it open."""
    if not 1 <= ranks <= _MAX_RANKS:
        raise ValueError(f"a group has 1 to {_MAX_RANKS} ranks, not {ranks}")
    collectives = _collectives()
    size = collectives.region_bytes(ranks, SLOT_BYTES)
    descriptor = os.memfd_create("quire-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)  # now, instead of SIGBUS later
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with mmap.mmap(descriptor, size) as region:
            start = ctypes.c_char.from_buffer(region)
            collectives.create(ctypes.addressof(start), ranks, SLOT_BYTES)
            del start
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class ShmGroup:
    """A rank's place in a group, whose ranks make the same calls in the same order. ``deadline``: seconds
    that a call waits for the others, without those in which this process itself could not run.
    """

    def __init__(self, descriptor: int, rank: int, *, deadline: float) -> None:
        """Join. The descriptor may be closed afterwards."""
        self._collectives = _collectives()
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._start = ctypes.c_char.from_buffer(self._memory)
        ranks = ctypes.c_int64.from_buffer(self._memory).value
        self.state = Group(ctypes.addressof(self._start), rank, round(deadline * 1e9))
        if not 0 <= rank < ranks:
            raise ValueError(f"there is no rank {rank} in a group of {ranks}")
        if not self._collectives.join(self.state):
            raise ValueError(f"a process has joined this group as rank {rank} before: make a new group")

    @property
    def rank(self) -> int:
        """The own number."""
        return int(self.state.rank)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return int(self.state.ranks)

    @property
    def calls(self) -> int:
        """Calls made."""
        return int(self.state.calls)

    @property
    def bytes(self) -> int:
        """Bytes of the parts that this rank has given."""
        return int(self.state.bytes)

    @property
    def waited(self) -> float:
        """Seconds in which calls waited for other ranks, but for waits of some microseconds."""
        return int(self.state.waited_ns) / 1e9

    def abort(self) -> None:
        """End the calls of all ranks, from any thread: those that wait and all later ones raise
        CollectiveError.
        """
        self._collectives.abort(self.state)


def shm_all_reduce(group: ShmGroup, part: Tensor) -> Tensor:
    """The sum of all ranks' parts, of one shape and dtype, with the same bits on all ranks. The part is
    overwritten if it is contiguous and float32 or bfloat16.
    """
    if part.dtype not in _DTYPES:
        return shm_all_reduce(group, part.float()).to(part.dtype)
    part = part.contiguous()
    if part.numel():
        _collectives().all_reduce(group.state, part)
    return part


def all_reduce_reference(parts: Sequence[Tensor]) -> Tensor:
    """The same by torch, from the parts of all ranks: added in their order in float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def shm_gather(group: ShmGroup, part: Tensor) -> Tensor:
    """On rank 0 all ranks' parts [T, n] side by side, [T, ranks * n]; on other ranks the part."""
    part = part.contiguous()
    if part.numel():
        return _collectives().gather(group.state, part)
    return part.repeat(1, group.ranks) if group.rank == 0 else part


def gather_reference(parts: Sequence[Tensor]) -> Tensor:
    """The same by torch, from the parts of all ranks."""
    return torch.cat(list(parts), -1)


def has_shm_collectives() -> bool:
    """Whether processes can form a group here."""
    return COLLECTIVES is not None


def _collectives() -> Collectives:
    if COLLECTIVES is None:
        raise RuntimeError("ranks share memory only where the CPU kernels are built: on x86-64, with gcc")
    return COLLECTIVES
