"""What the runner wants of a device that computes by itself while the host goes on. Implemented by
``cuda_device``; a test that has no such device brings one that only pretends.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Outputs = tuple[Tensor, Tensor]


class Memory(NamedTuple):
    """Bytes of a device's memory; the last two are this process's."""

    total: int
    free: int
    reserved: int
    allocated: int


class Device(Protocol):
    """All happens in the order of the calls, and none of them waits, but for what ``download`` returns."""

    place: torch.device
    capability: int  # compute capability: 90 of an H100 or H200

    def upload(self, array: NDArray[Any]) -> Tensor:
        """A copy there; the array may be changed as soon as this returns."""

    def download(self, tensor: Tensor) -> Callable[[], NDArray[np.int64]]:
        """What a tensor i64 holds at this point of the order, for whoever waits for it."""

    def capture(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """(a replay of the very launches that ``compute`` makes, where their results lie). It is called
        before, too, so that nothing is compiled or allocated for the first time under way.
        """

    def host_memory(self, size: int) -> Tensor:
        """u8 [size] of the host's memory, from which it copies without anybody waiting."""

    def copy_beside(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """A copy from ``host_memory`` that begins behind what was asked so far, and goes on beside what is
        asked next. What is asked after the result was called finds it done.
        """

    def peak_bytes(self, compute: Callable[[], object]) -> int:
        """How much more memory than now is in use at the worst moment of ``compute``."""

    def memory(self) -> Memory:
        """As it is now."""
