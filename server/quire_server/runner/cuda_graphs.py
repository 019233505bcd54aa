"""Decode steps as captured graphs, one for each shape of batch. Owned by ``device_steps``.

A graph is replayed by one call of the host instead of hundreds, over buffers that stay where they are: the
step's numbers are copied in, and whatever the batch lacks to the graph's shape is padding. What was sampled
and the logits lie where the capture left them, until the next replay.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quire_server.core import graph_buckets
from quire_server.core.graph_buckets import Shape
from quire_server.runner.device import Device, Outputs

logger = logging.getLogger(__name__)


class CudaGraphs:
    """``capture`` before the first step; without it, nothing is ever taken."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._graphs: dict[Shape, tuple[Tensor, Callable[[], None], Outputs]] = {}

    def capture(
        self,
        shapes: tuple[Shape, ...],
        padding: int,
        compute: Callable[[Tensor], Outputs],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Capture ``compute`` (entries i64 [3, sequences, tokens]) for each of ``shapes``, which begin with
        the largest; on_progress(graphs captured, all).
        """
        largest = max(sequences * tokens for sequences, tokens in shapes)
        buffer = torch.zeros(3, largest, dtype=torch.int64, device=self._device.place)
        buffer[0], buffer[1] = padding, -1
        for number, shape in enumerate(shapes):
            on_progress(number, len(shapes))
            entries = buffer[:, : shape[0] * shape[1]].unflatten(1, shape)
            self._graphs[shape] = (entries, *self._device.capture(partial(compute, entries)))
        on_progress(len(shapes), len(shapes))
        logger.info("graphs captured", extra={"shapes": shapes})

    def shape_for(self, counts: Sequence[int]) -> Shape | None:
        """That of the graph which computes sequences of so many tokens each; None: there is none."""
        return graph_buckets.shape_for(counts, tuple(self._graphs))

    def replay(self, entries: Tensor) -> Outputs:
        """The outputs for entries i64 [3, sequences, tokens], padded to the shape of a graph."""
        sequences, tokens = entries.shape[1:]
        buffer, replay, outputs = self._graphs[sequences, tokens]
        buffer.copy_(entries)
        replay()
        return outputs
