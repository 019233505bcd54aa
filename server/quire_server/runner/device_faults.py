"""What a GPU reports when it cannot go on, in words that say what to do. Called by ``model_runner``.

After a fault of the device nothing that it holds can be read or believed, and every further call fails: the
process ends, and the pod starts afresh. Memory that ran out in a step costs one request (``out_of_memory``);
where there is none to give up, the process ends, too, and says that it was that.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire_server.core.errors import DeviceError, DeviceMemoryError
from quire_server.runner import out_of_memory

_SPEAKERS = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "CUDNN_STATUS_")


@contextmanager
def named(when: str = "in a step") -> Iterator[None]:
    """Within it a fault of the device is a DeviceError."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        if out_of_memory.is_devices(error):
            raise DeviceMemoryError(
                f"The GPU has no memory left {when}: {said} Lower --gpu-memory-utilization, which leaves "
                "more to steps and graphs, --max-num-seqs or --max-num-batched-tokens; serve a smaller or a "
                "quantised model; or take a larger GPU."
            ) from error
        if not isinstance(error, torch.AcceleratorError) and not any(each in said for each in _SPEAKERS):
            raise
        raise DeviceError(
            f"The GPU failed {when}: {said}. The pod starts again; if that does not help, look for the "
            "Xid in the kernel's log of the node, and drain it."
        ) from error
