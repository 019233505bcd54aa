"""CudaDevice: asynchronous copies, graph capture, memory figures. It decides nothing. The only module that
calls CUDA, but for what ranks exchange (``layers.parallel``).
"""

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.topology import Topology
from quire_server.errors import ConfigError
from quire_server.runner.gpu.device import BesideCopy, Memory, Outputs

_ALONE = Topology()
_POLL_SECONDS = 20e-6


class _Copy:
    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def arrive(self) -> None:
        """The stream of the steps waits for the event, and the host does not."""
        torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        """The host waits for the event."""
        self._done.synchronize()


class CudaDevice:
    """A rank's GPU: of those that this process sees the one with the rank's number on its node. A pod sees
    only its own GPUs; CUDA_VISIBLE_DEVICES, if it is set, says which there are and in what order.
    """

    @staticmethod
    def is_there() -> bool:
        """Whether this process sees a GPU."""
        return torch.cuda.is_available()

    @staticmethod
    def total_bytes() -> int:
        """Memory of the first GPU; 0 without one."""
        return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0

    def __init__(self, topology: Topology = _ALONE) -> None:
        if not self.is_there():
            raise ConfigError(
                "There is no CUDA device: run where an NVIDIA GPU and its driver are, or use --device cpu."
            )
        if (count := torch.cuda.device_count()) < topology.node_size:
            flags = f"--tensor-parallel-size {topology.tensor}"
            if topology.pipeline > 1:
                flags += f" times --pipeline-parallel-size {topology.pipeline}"
            if topology.nodes > 1:
                flags += f" on --nodes {topology.nodes}"
            raise ConfigError(
                f"{flags} needs {topology.node_size} GPUs, one for each rank of a node, "
                f"and there are {count}: give the pod more GPUs (or name them in CUDA_VISIBLE_DEVICES), "
                "have fewer ranks, or use --device cpu."
            )
        self.place = torch.device("cuda", topology.local_rank)
        torch.cuda.set_device(self.place)  # before anything is allocated, which would be on the first one
        kinds = {torch.cuda.get_device_capability(number) for number in range(topology.node_size)}
        if len(kinds) > 1:
            found = " and ".join(f"{major}.{minor}" for major, minor in sorted(kinds))
            raise ConfigError(
                f"The GPUs have the compute capabilities {found}, and ranks must compute alike: give the pod "
                "GPUs of one kind, or name alike ones in CUDA_VISIBLE_DEVICES."
            )
        major, minor = torch.cuda.get_device_capability(self.place)
        self.capability = 10 * major + minor
        # cuDNN builds a graph for each length of a prompt; torch takes its flash attention then.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._stream = torch.cuda.Stream(self.place)  # capture needs a stream other than the default
        self._copies = torch.cuda.Stream(self.place)
        self._pool: Any = None  # shared by all graphs, which never run at the same time

    def upload(self, array: NDArray[Any]) -> Tensor:
        """Copy through pinned memory, because a copy from pageable memory blocks. torch keeps it until the
        copy is done.
        """
        return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(self.place, non_blocking=True)

    def download(self, tensor: Tensor) -> Callable[[], NDArray[Any]]:
        """Queue the copy on the stream; the returned function waits for the event behind it."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait() -> NDArray[Any]:
            done.synchronize()
            return host.numpy()

        return wait

    def capture(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Run once eagerly, which compiles kernels and allocates workspaces, then capture."""
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
        """Pin the memory in place: torch's own allocator would round the size up to a power of two."""
        memory = torch.empty(size, dtype=torch.uint8)
        self.pin(memory, "--cpu-offload-gb")
        return memory

    def pin(self, memory: Tensor, flag: str) -> None:
        """By the driver, which may refuse more than the user may lock."""
        if error := int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            raise ConfigError(
                f"{memory.nbytes >> 20} MiB of the host's memory could not be pinned (CUDA error {error}): "
                f"lower {flag}, or give the host more memory."
            )
        weakref.finalize(memory, _unpin, memory.data_ptr()).atexit = False

    def copy_beside(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> BesideCopy:
        """Copy on a second stream, between two events."""
        queued, done = torch.cuda.Event(), torch.cuda.Event()
        queued.record()
        self._copies.wait_event(queued)
        with torch.cuda.stream(self._copies):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record()
        return _Copy(done)

    def finish(self, seconds: float) -> bool:
        """Asks again and again: CUDA's own wait has no limit, and a peer that is gone never arrives."""
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + seconds
        while not done.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def peak_bytes(self, compute: Callable[[], object]) -> int:
        """Measured by torch's allocator."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compute()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        return peak

    def memory(self) -> Memory:
        """Current memory figures."""
        free, total = torch.cuda.mem_get_info(self.place)
        reserved, allocated = torch.cuda.memory_reserved(self.place), torch.cuda.memory_allocated(self.place)
        return Memory(total, free, reserved, allocated)


def _unpin(address: int) -> None:
    """Unpin once no copy can read the memory any more."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
