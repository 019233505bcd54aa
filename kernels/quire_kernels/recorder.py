"""Native calls that are kept instead of made, and memory for their results. Called by `native` and
`recording`.
"""

import ctypes
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel's address, its arguments, and whether more than one thread is worth while."""

    kernel: int
    arguments: ctypes.Structure
    is_large: bool


@dataclass
class Recorder:
    """A piece of memory serves several results, one after the other: it is free again when no tensor lies in
    it any more, just as it would be if the calls were made.
    """

    calls: list[Call] = field(default_factory=list)
    _pieces: list[NDArray[np.uint8]] = field(default_factory=list)
    _free: dict[int, list[NDArray[np.uint8]]] = field(default_factory=dict)  # by size

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As ``torch.empty``."""
        size = math.prod(shape) * dtype.itemsize
        free = self._free.setdefault(size, [])
        if not free:
            memory = np.empty(size + _ALIGNMENT, np.uint8)
            first = -memory.ctypes.data % _ALIGNMENT
            free.append(memory[first : first + size])
            self._pieces.append(free[0])
        piece = free.pop()
        lease = piece[:]  # an object of its own, which the tensors' storage keeps alive
        weakref.finalize(lease, free.append, piece)
        return torch.from_numpy(lease).view(dtype).view(*shape)
