"""A device that only pretends: its memory is the host's, and it computes at once. What the host gets to know
of it, and when, is as on a real one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.runner.device import Memory, Outputs


class PretendDevice:
    """``log`` has what was asked of it; ``fault``, once set, is what every wait ends in."""

    place = torch.device("cpu")

    def __init__(self, total: int = 1 << 30, capability: int = 90) -> None:
        self.total, self.capability = total, capability
        self.log: list[str] = []
        self.fault: Exception | None = None

    def upload(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.array(array))

    def download(self, tensor: Tensor) -> Callable[[], NDArray[np.int64]]:
        self.log.append("download")
        copied = tensor.clone()

        def wait() -> NDArray[np.int64]:
            self.log.append("wait")
            if self.fault is not None:
                raise self.fault
            return copied.numpy()

        return wait

    def capture(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Remembers the call, and replays it into the memory of the first results."""
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

    def copy_beside(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Nothing has arrived before somebody made sure, and what was there is gone."""
        self.log.append("copy")
        target.fill_(0xFF)  # not a number in every type of float

        def arrive() -> None:
            self.log.append("arrive")
            target.copy_(source)

        return arrive

    def peak_bytes(self, compute: Callable[[], object]) -> int:
        compute()
        return 1 << 20

    def memory(self) -> Memory:
        return Memory(self.total, self.total - (96 << 20), 64 << 20, 48 << 20)
