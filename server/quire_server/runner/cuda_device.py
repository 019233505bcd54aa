"""The only place that speaks to CUDA: copies that wait for nobody, captured graphs, figures of memory.

Made by ``model_runner`` where the model is to run on a GPU. Nothing in here is a decision.
"""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.errors import ConfigError
from quire_server.runner.device import Memory, Outputs


class CudaDevice:
    """The first GPU that this process sees: a pod sees its own ones only."""

    @staticmethod
    def is_there() -> bool:
        """Whether this process sees any."""
        return torch.cuda.is_available()

    def __init__(self) -> None:
        if not self.is_there():
            raise ConfigError(
                "There is no CUDA device: run where an NVIDIA GPU and its driver are, or use --device cpu."
            )
        self.place = torch.device("cuda", 0)
        torch.cuda.set_device(self.place)
        major, minor = torch.cuda.get_device_capability(self.place)
        self.capability = 10 * major + minor
        self._stream = torch.cuda.Stream(self.place)  # captures want another one than the default
        self._copies = torch.cuda.Stream(self.place)
        self._pool: Any = None  # shared by all graphs: they never run at once

    def upload(self, array: NDArray[Any]) -> Tensor:
        """By pinned memory, which torch keeps until the copy is done: from other memory CUDA waits."""
        return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(self.place, non_blocking=True)

    def download(self, tensor: Tensor) -> Callable[[], NDArray[np.int64]]:
        """The copy is one more piece of work of the stream; the event after it is what is waited for."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait() -> NDArray[np.int64]:
            done.synchronize()
            return host.numpy()

        return wait

    def capture(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Once as it is, for compilers and workspaces, and once captured."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = compute()
        self._pool = graph.pool()
        return graph.replay, outputs

    def host_memory(self, size: int) -> Tensor:
        """Pinned where it is: torch's own pinned memory would be rounded up to a power of two."""
        memory = torch.empty(size, dtype=torch.uint8)
        if error := int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)):
            raise ConfigError(
                f"{size >> 20} MiB of the host's memory could not be pinned (CUDA error {error}): "
                "lower --cpu-offload-gb, or give the host more memory."
            )
        weakref.finalize(memory, _unpin, memory.data_ptr()).atexit = False
        return memory

    def copy_beside(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """On a stream of its own, between two events."""
        asked, done = torch.cuda.Event(), torch.cuda.Event()
        asked.record()
        self._copies.wait_event(asked)
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            done.record()
        return lambda: torch.cuda.current_stream().wait_event(done)

    def peak_bytes(self, compute: Callable[[], object]) -> int:
        """By the allocator's own count."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compute()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        return peak

    def memory(self) -> Memory:
        """As it is now."""
        free, total = torch.cuda.mem_get_info(self.place)
        reserved, allocated = torch.cuda.memory_reserved(self.place), torch.cuda.memory_allocated(self.place)
        return Memory(total, free, reserved, allocated)


def _unpin(address: int) -> None:
    """Once no copy reads it any more."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
