"""Weights that stay in the host's memory, on their way to the GPU: while it computes with one layer's, the
next one's are copied beside it. Made by ``parts`` after loading, called by the model around each layer.

Two buffers on the device take turns. A layer's tensors lie in its buffer for good, so that whatever computes
with them need not know; what changes is what lies there. Decides nothing: ``core.weight_offload`` did.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from quire_server.core.weight_offload import BUFFERS
from quire_server.models.decoder import Decoder
from quire_server.runner.device import Device

_ALIGNED = 256  # bytes: what kernels take for granted, and copies like


@dataclass(slots=True)
class _Held:
    """What a buffer holds, or will as soon as ``arrive`` was called."""

    number: int
    arrive: Callable[[], None]


class WeightStream:
    """``layers`` of the model, in their order; their weights are moved out of where they were loaded."""

    def __init__(self, model: Decoder, layers: Sequence[int], device: Device) -> None:
        self._device = device
        self._numbers = {index: number for number, index in enumerate(layers)}
        weights = [
            [tensor for linear in model.layers[index].linears for tensor in linear.weights()]
            for index in layers
        ]
        ends = [list(accumulate(_padded(tensor) for tensor in tensors)) for tensors in weights]
        self._buffers = [
            torch.empty(max(end[-1] for end in ends), dtype=torch.uint8, device=device.place)
            for _ in range(BUFFERS)
        ]
        self._host = []
        for number, (tensors, its_ends) in enumerate(zip(weights, ends, strict=True)):
            host = device.host_memory(its_ends[-1])
            for tensor, end in zip(tensors, its_ends, strict=True):
                place = slice(begin := end - _padded(tensor), begin + tensor.nbytes)
                host[place] = tensor.contiguous().view(-1).view(torch.uint8)
                buffer = self._buffers[number % BUFFERS][place]
                tensor.data = buffer.view(tensor.dtype).view(tensor.shape)
            self._host.append(host)
        self._held = [self._begin(number) for number in range(BUFFERS)]

    @property
    def host_bytes(self) -> int:
        """Of the host's memory."""
        return sum(host.nbytes for host in self._host)

    def before(self, layer: int) -> None:
        """What is asked of the device from now on finds the layer's weights."""
        if (number := self._numbers.get(layer)) is None:
            return
        held = self._held[number % BUFFERS]
        if held.number != number:  # a step ended before its last layer
            self._held[number % BUFFERS] = held = self._begin(number)
        held.arrive()

    def after(self, layer: int) -> None:
        """Nothing more is asked of the device that reads the layer's weights, until the next step."""
        if (number := self._numbers.get(layer)) is None:
            return
        following = number + BUFFERS
        if following >= len(self._host):
            following = number % BUFFERS
        self._held[number % BUFFERS] = self._begin(following)

    def _begin(self, number: int) -> _Held:
        host = self._host[number]
        target = self._buffers[number % BUFFERS][: len(host)]
        return _Held(number, self._device.copy_beside(target, host))


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED
