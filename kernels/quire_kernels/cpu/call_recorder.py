"""Records native calls instead of making them, and allocates the memory of their results."""

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
    """A kernel's address, its arguments, and whether it is worth more than one thread."""

    kernel: int
    arguments: ctypes.Structure
    is_large: bool


@dataclass
class Recorder:
    """The recorded calls, and an allocator for their results.

    A buffer is reused once no tensor refers to it any more, as it would be if the calls were made.
    """

    calls: list[Call] = field(default_factory=list)
    _buffers: list[NDArray[np.uint8]] = field(default_factory=list)
    _free: dict[int, list[NDArray[np.uint8]]] = field(default_factory=dict)  # by size

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As ``torch.empty``."""
        size = math.prod(shape) * dtype.itemsize
        free = self._free.setdefault(size, [])
        if not free:
            memory = np.empty(size + _ALIGNMENT, np.uint8)
            first = -memory.ctypes.data % _ALIGNMENT
            free.append(memory[first : first + size])
            self._buffers.append(free[0])
        buffer = free.pop()
        view = buffer[:]  # an object of its own, which the tensors' storage keeps alive
        weakref.finalize(view, free.append, buffer)
        return torch.from_numpy(view).view(dtype).view(*shape)
