"""The interface to a device that computes asynchronously, and the translation of its errors.

``CudaDevice`` implements it; tests use a fake device on the CPU. A device error means that nothing in the
device's memory can be trusted and every further call fails: the process ends and the pod restarts. Running
out of memory in a step costs one request only (``oom_retry``); outside of steps it ends the process too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.errors import DeviceError, DeviceMemoryError
from quire_server.runner import oom_retry

Outputs = tuple[Tensor, Tensor]


class Memory(NamedTuple):
    """Bytes of a device's memory; the last two are this process's."""

    total: int
    free: int
    reserved: int
    allocated: int


def upload_together(
    upload: Callable[[NDArray[Any]], Tensor], *arrays: NDArray[np.int64]
) -> tuple[Tensor, ...]:
    """Upload arrays of one length by one copy. Each begins at a multiple of 16 bytes, as in a tensor of its
    own: Triton compiles a kernel once more for addresses that are no such multiples.
    """
    length = len(arrays[0])
    padded = np.zeros((len(arrays), length + length % 2), np.int64)
    padded[:, :length] = arrays
    return upload(padded)[:, :length].unbind(0)


class BesideCopy(Protocol):
    """Copies that run beside the steps."""

    def arrive(self) -> None:
        """What is queued after this call runs when the copies are complete."""

    def wait(self) -> None:
        """Return when the copies are complete."""


class Device(Protocol):
    """Operations are executed in the order of the calls, and no call blocks except the function that
    ``download`` returns, and ``BesideCopy.wait``.
    """

    place: torch.device
    capability: int  # compute capability: 90 of an H100 or H200

    def upload(self, array: NDArray[Any]) -> Tensor:
        """Copy an array to the device; the array may be changed as soon as this returns."""

    def download(self, tensor: Tensor) -> Callable[[], NDArray[Any]]:
        """Queue a copy of a tensor to the host; the returned function waits for it."""

    def capture(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """(replay, outputs): capture the launches of ``compute`` as a graph. ``compute`` also runs once
        before, so that nothing is compiled or allocated during capture.
        """

    def host_memory(self, size: int) -> Tensor:
        """u8 [size] of host memory from which copies do not block."""

    def pin(self, memory: Tensor, flag: str) -> None:
        """Make these pages of the host such memory. ``flag``: the setting that says how many there are."""

    def copy_beside(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> BesideCopy:
        """Start copies to the first from the second of each pair, one of which is in ``host_memory`` or
        pinned. They run after everything queued so far, in the order of the calls among themselves, and
        concurrently with what is queued next.
        """

    def peak_bytes(self, compute: Callable[[], object]) -> int:
        """The peak of memory that ``compute`` allocates, in bytes."""

    def finish(self, seconds: float) -> bool:
        """Wait until everything queued is executed; False: it was not within ``seconds``."""

    def memory(self) -> Memory:
        """Current memory figures."""


def _is_too_large(error: Exception) -> bool:
    """Whether Triton says that a kernel needs more shared memory or registers than a multiprocessor has. By
    name, since triton is not imported where there is no GPU.
    """
    kind = type(error)
    return kind.__name__ == "OutOfResources" and kind.__module__.startswith("triton")


_MESSAGE_PREFIXES = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "CUDNN_STATUS_")


@contextmanager
def translate_device_errors(when: str = "in a step") -> Iterator[None]:
    """Raise errors of the device as DeviceError, or DeviceMemoryError, with a text that names the remedy."""
    try:
        yield
    except Exception as error:
        if _is_too_large(error):
            raise DeviceError(
                f"A kernel needs more of the GPU than it has ({when}: {error}). No configuration of it is "
                "known for this GPU and model: take an A100, L4, L40S, H100 or H200, or another model."
            ) from error
        if not isinstance(error, RuntimeError):
            raise
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        if oom_retry.is_device_out_of_memory(error):
            raise DeviceMemoryError(
                f"The GPU has no memory left {when}: {message} Lower --gpu-memory-utilization, which leaves "
                "more to steps and graphs, --max-num-seqs or --max-num-batched-tokens; serve a smaller or a "
                "quantised model; or take a larger GPU."
            ) from error
        if not isinstance(error, torch.AcceleratorError) and not any(
            each in message for each in _MESSAGE_PREFIXES
        ):
            raise
        raise DeviceError(
            f"The GPU failed {when}: {message}. The pod starts again; if that does not help, look for the "
            "Xid in the kernel's log of the node, and drain it."
        ) from error
