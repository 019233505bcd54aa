"""A fake device on the CPU, which computes at once. Which results the host sees, and when, is as on a real
one.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.runner.gpu.device import BesideCopy, Memory, Outputs


class _Copy:
    def __init__(self, device: "FakeDevice", pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._device, self.pairs = device, pairs

    def arrive(self) -> None:
        self._device.log.append("arrive")
        self._device.complete(self)

    def wait(self) -> None:
        self._device.log.append("landed")
        self._device.complete(self)


class FakeDevice:
    """``log`` lists the calls; ``widest_download`` has the columns of a matrix, ``largest_upload`` bytes;
    ``fault``, if set, is raised by every wait for a download.
    """

    place = torch.device("cpu")

    def __init__(self, total: int = 1 << 30, capability: int = 90) -> None:
        self.total, self.capability = total, capability
        self.log: list[str] = []
        self.widest_download = self.largest_upload = 0
        self.fault: Exception | None = None
        self._beside = deque[_Copy]()

    def upload(self, array: NDArray[Any]) -> Tensor:
        self.largest_upload = max(self.largest_upload, array.nbytes)
        return torch.from_numpy(np.array(array))

    def download(self, tensor: Tensor) -> Callable[[], NDArray[Any]]:
        self.log.append("download")
        self.widest_download = max(self.widest_download, tensor.shape[1] if tensor.dim() == 2 else 0)
        copied = tensor.clone()

        def wait() -> NDArray[Any]:
            self.log.append("wait")
            if self.fault is not None:
                raise self.fault
            return copied.numpy()

        return wait

    def capture(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Remembers the function, and replays it into the memory of the first results."""
        compute()
        outputs = compute()
        self.log.append("capture")

        def replay() -> None:
            self.log.append("replay")
            for kept, new in zip(outputs, compute(), strict=True):
                kept.copy_(new)

        return replay, outputs

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def pin(self, memory: Tensor, flag: str) -> None:
        self.log.append(f"pin {memory.nbytes} of {flag}")

    def copy_beside(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> BesideCopy:
        """Overwrites the targets at once, and copies only when the caller waits for this copy or a later one:
        who reads a target too early reads NaN, and who overwrites a source too early changes the copy.
        """
        self.log.append("copy")
        for target, _ in pairs:
            target.view(torch.uint8).fill_(0xFF)  # NaN in every float type
        self._beside.append(made := _Copy(self, pairs))
        return made

    def complete(self, made: "_Copy") -> None:
        """Make the copies up to this one, in the order of their calls."""
        while made in self._beside:
            for target, source in self._beside.popleft().pairs:
                target.copy_(source)

    def finish(self, seconds: float) -> bool:
        return True

    def peak_bytes(self, compute: Callable[[], object]) -> int:
        compute()
        return 1 << 20

    def memory(self) -> Memory:
        return Memory(self.total, self.total - (96 << 20), 64 << 20, 48 << 20)
