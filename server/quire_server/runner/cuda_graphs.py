"""Decode steps as captured graphs, one for each size of batch. Owned by ``device_steps``.

A graph is replayed by one call of the host instead of hundreds, over buffers that stay where they are: the
step's numbers are copied in, and whatever the batch lacks to the graph's size is padding. What was sampled
and the logits lie where the capture left them, until the next replay.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire_server.core import graph_buckets
from quire_server.runner.device import Device, Outputs

logger = logging.getLogger(__name__)


class CudaGraphs:
    """``capture`` before the first step; without it, nothing is ever taken."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._graphs: dict[int, tuple[Tensor, Callable[[], None], Outputs]] = {}

    def capture(
        self,
        sizes: tuple[int, ...],
        padding: int,
        compute: Callable[[Tensor], Outputs],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Capture ``compute`` (entries i64 [3, size]) for each of ``sizes``, which begin with the largest;
        on_progress(graphs captured, all).
        """
        buffer = torch.zeros(3, sizes[0], dtype=torch.int64, device=self._device.place)
        buffer[0], buffer[1] = padding, -1
        for number, size in enumerate(sizes):
            on_progress(number, len(sizes))
            entries = buffer[:, :size]
            self._graphs[size] = (entries, *self._device.capture(partial(compute, entries)))
        on_progress(len(sizes), len(sizes))
        logger.info("graphs captured", extra={"sizes": sizes})

    def size_for(self, num_entries: int) -> int | None:
        """That of the graph which computes so many decodes; None: there is none."""
        return graph_buckets.size_for(num_entries, tuple(self._graphs))

    def replay(self, entries: Tensor) -> Outputs:
        """The outputs for entries i64 [3, size], padded to the size of a graph."""
        buffer, replay, outputs = self._graphs[entries.shape[1]]
        buffer.copy_(entries)
        replay()
        return outputs
