"""The LoRA adapters of a loaded model: on the host, by number, and in the slots of its layers.

Reading may happen on another thread; everything else belongs to the engine's. Which adapter gets which slot
is decided by the scheduler (``core.adapter_slots``).
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from quire_server.layers.linear import LinearLayer
from quire_server.layers.lora import AdaptedLinear, BatchAdapters
from quire_server.models import adapter_file
from quire_server.models.adapter_file import AdapterFile, HostRoom
from quire_server.models.decoder import Decoder

logger = logging.getLogger(__name__)

_HOST_SHARE = 4  # a quarter of the host's memory beside the model is for adapters


class Adapters:
    """``batch``: what a pass has to be given. ``shapes``: (out, in) of each matrix that may be adapted.
    ``room``: of the host, for those that are loaded; none before `limit`.
    """

    def __init__(
        self, model: Decoder, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        """Puts slots beside the layers of a filled model. ``device``: the GPU; None: a CPU computes."""
        self.batch = BatchAdapters(num_slots)
        self.max_rank = max_rank
        self.dtype = dtype
        self.room = HostRoom(0)
        self.is_on_host = device is None
        self._num_slots = num_slots
        self._linears: list[AdaptedLinear] = []
        self._files: dict[int, AdapterFile] = {}

        def adapt(
            prefixes: Sequence[str], inner: LinearLayer, in_size: int, sizes: Sequence[int]
        ) -> AdaptedLinear:
            made = AdaptedLinear(prefixes, inner, in_size, sizes, self.batch, max_rank, dtype, device)
            self._linears.append(made)
            return made

        for layer in model.layers:
            layer.adapt(adapt)
        self.shapes = {
            prefix: (size, linear.in_size)
            for linear in self._linears
            for prefix, size in zip(linear.prefixes, linear.sizes, strict=True)
        }

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, at the highest rank."""
        return sum(map(sum, self.shapes.values())) * self.max_rank * self.dtype.itemsize

    def limit(self, available: int) -> int:
        """Set the room on the host by the bytes that are left there. Returns what adapters may take of them,
        slots included where a CPU computes, whose slots are filled later.
        """
        slots = self._num_slots * self.slot_bytes
        on_host = slots if self.is_on_host else 0
        self.room.limit = max(0, available - on_host) // _HOST_SHARE
        logger.info("room for adapters", extra={"slot_bytes": slots, "host_bytes": self.room.limit})
        return on_host + self.room.limit

    def read(self, directory: Path) -> AdapterFile:
        """Read and check an adapter; from any thread. Raises errors of `quire_server.errors`."""
        return adapter_file.read(directory, self.shapes, self.max_rank, self.dtype, self.room)

    def add(self, number: int, file: AdapterFile) -> None:
        """Keep an adapter on the host."""
        self._files[number] = file

    def remove(self, number: int) -> None:
        """Drop it; no request may use it any more."""
        del self._files[number]

    @torch.inference_mode()
    def load(self, slot: int, number: int) -> None:
        """Copy an adapter to a slot."""
        file = self._files[number]
        for linear in self._linears:
            linear.fill(slot, file.factors, file.rank)
