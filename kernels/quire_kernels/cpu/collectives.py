"""Exchanges among processes of one host (csrc/shm_collectives.c), on any x86-64 CPU; `COLLECTIVES` is None
unless they are built.
"""

import ctypes

import torch
from torch import Tensor

from quire_kernels.cpu.library import LIBRARY, Library, arguments
from quire_kernels.cpu.shm_group import Group

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_SMALL_PASS = 16_384  # elements below which a second thread costs more than it saves
_KERNELS = {
    "shm_all_reduce": arguments("group x", "size dtype"),
    "shm_gather": arguments("group x y", "size"),
}


class Collectives:
    """Typed calls of the C functions, which check nothing."""

    def __init__(self, library: Library) -> None:
        self._library, self._loaded = library, library.loaded
        kernels = library.kernels(_KERNELS)
        self._all_reduce, self._gather = kernels["shm_all_reduce"], kernels["shm_gather"]

    def region_bytes(self, ranks: int, slot_bytes: int) -> int:
        """The size of the memory that ``ranks`` ranks share."""
        return int(self._loaded.quire_shm_create(None, ranks, slot_bytes))

    def create(self, address: int, ranks: int, slot_bytes: int) -> None:
        """Prepare this memory, which is all zeros, for them."""
        self._loaded.quire_shm_create(address, ranks, slot_bytes)

    def join(self, group: Group) -> bool:
        """Join as a rank. False where a process has joined as that rank before."""
        return bool(self._loaded.quire_shm_join(ctypes.byref(group)))

    def abort(self, group: Group) -> None:
        """End the calls of all ranks, from any thread."""
        self._loaded.quire_shm_abort(ctypes.byref(group))

    def all_reduce(self, group: Group, x: Tensor) -> None:
        """As ``all_reduce_reference``, in place, of contiguous [rows, ...]."""
        rows = x.shape[0]
        size = x.numel() // rows
        is_large = rows * size > _SMALL_PASS
        self._library.call(
            self._all_reduce, rows, is_large, ctypes.addressof(group), x.data_ptr(), size, _DTYPES[x.dtype]
        )

    def gather(self, group: Group, x: Tensor) -> Tensor:
        """As ``gather_reference`` on rank 0, x on other ranks; x is contiguous [rows, n]."""
        rows, size = x.shape
        y = self._library.empty((rows, group.ranks * size), x.dtype) if group.rank == 0 else x
        self._library.call(
            self._gather,
            rows,
            rows * size > _SMALL_PASS,
            ctypes.addressof(group),
            x.data_ptr(),
            y.data_ptr(),
            size * x.itemsize,
        )
        return y


COLLECTIVES = Collectives(LIBRARY) if LIBRARY is not None else None
