"""What a GPU reports when it cannot go on, in words that say what to do. Called by ``model_runner``.

After a fault of the device nothing that it holds can be read or believed, and every further call fails: the
process ends, and the pod starts afresh. Memory that ran out is another matter (``out_of_memory``).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire_server.core.errors import DeviceError


@contextmanager
def named() -> Iterator[None]:
    """Within it a fault of the device is a DeviceError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except torch.AcceleratorError as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DeviceError(
            f"The GPU failed in a step: {first}. The pod starts again; if that does not help, look for the "
            "Xid in the kernel's log of the node, and drain it."
        ) from error
