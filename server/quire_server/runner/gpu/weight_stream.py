"""Streams the weights of offloaded layers from the host's memory: while the GPU computes one layer, the next
one's weights are copied.

Two buffers on the GPU alternate. A layer's tensors are views of its buffer, so the layer itself is unchanged;
only the buffer's content changes. ``core.weight_offload`` decides which layers are streamed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from quire_server.core.weight_offload import BUFFERS
from quire_server.models.decoder import Decoder
from quire_server.runner.gpu.device import BesideCopy, Device

_ALIGNED = 256  # bytes: the alignment that kernels assume


@dataclass(slots=True)
class _Held:
    """The layer that a buffer holds once its copy has arrived."""

    number: int
    copy: BesideCopy


class WeightStream:
    """``layers`` of the model in their order; their weights are moved to host memory."""

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
        """Bytes in host memory."""
        return sum(host.nbytes for host in self._host)

    def before(self, layer: int) -> None:
        """Make the layer's weights available to everything queued after this call."""
        if (number := self._numbers.get(layer)) is None:
            return
        held = self._held[number % BUFFERS]
        if held.number != number:  # the previous step failed before its last layer
            self._held[number % BUFFERS] = held = self._begin(number)
        held.copy.arrive()

    def after(self, layer: int) -> None:
        """Start to overwrite the layer's buffer with a later layer's weights: nothing queued from now on
        reads it.
        """
        if (number := self._numbers.get(layer)) is None:
            return
        following = number + BUFFERS
        if following >= len(self._host):
            following = number % BUFFERS
        self._held[number % BUFFERS] = self._begin(following)

    def _begin(self, number: int) -> _Held:
        host = self._host[number]
        target = self._buffers[number % BUFFERS][: len(host)]
        return _Held(number, self._device.copy_beside([(target, host)]))


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED
