"""CUDA graphs of decode steps, one per batch shape.

One replay replaces hundreds of kernel launches. It works on fixed buffers: the step's entries are copied in
and padded to the shape, and logits and sampled tokens are valid where the capture left them until the next
replay.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire_server.core import cuda_graph_shapes
from quire_server.core.cuda_graph_shapes import Shape
from quire_server.runner.gpu.device import Device, Outputs

logger = logging.getLogger(__name__)


class _Graph(NamedTuple):
    entries: Tensor
    states: Tensor | None
    replay: Callable[[], None]
    outputs: Outputs


class CudaGraphs:
    """The captured graphs; none before ``capture``."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._graphs: dict[Shape, _Graph] = {}
        self._padding = 0

    def capture(
        self,
        shapes: tuple[Shape, ...],
        padding: int,
        compute: Callable[[Tensor, Tensor | None], Outputs],
        no_states: Callable[[int], Tensor | None],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Capture ``compute`` (entries i64 [3, sequences, tokens], states of the stage before) for each of
        ``shapes``, largest first; on_progress(graphs captured, all). ``no_states``: as the model's.
        """
        largest = max(sequences * tokens for sequences, tokens in shapes)
        buffer = torch.zeros(3, largest, dtype=torch.int64, device=self._device.place)
        self._padding = padding
        _pad(buffer, padding)
        states = no_states(largest)
        for number, shape in enumerate(shapes):
            on_progress(number, len(shapes))
            entries = buffer[:, : shape[0] * shape[1]].unflatten(1, shape)
            received = None if states is None else states[:, : shape[0] * shape[1]]
            captured = self._device.capture(partial(compute, entries, received))
            self._graphs[shape] = _Graph(entries, received, *captured)
        on_progress(len(shapes), len(shapes))
        logger.info("graphs captured", extra={"shapes": shapes})

    def shape_for(self, counts: Sequence[int]) -> Shape | None:
        """The shape of the graph that computes sequences with these token counts; None if there is none."""
        return cuda_graph_shapes.shape_for(counts, tuple(self._graphs))

    def replay(self, entries: Tensor, states: Tensor | None = None) -> Outputs:
        """The outputs for entries i64 [3, sequences, tokens], which are padded to the shape of a graph, and
        in a further stage for the ``states`` [2, sequences * tokens, hidden] of the one before.
        """
        sequences, tokens = entries.shape[1:]
        graph = self._graphs[sequences, tokens]
        graph.entries.copy_(entries)
        if graph.states is not None:
            assert states is not None
            graph.states.copy_(states)
        graph.replay()
        return graph.outputs

    def replay_padding(self, shape: Shape) -> None:
        """Replay a graph for no sequence at all."""
        graph = self._graphs[shape]
        _pad(graph.entries, self._padding)
        graph.replay()


def _pad(entries: Tensor, padding: int) -> None:
    """In place: the row that belongs to no request, and no position."""
    entries[0] = padding
    entries[1] = -1
