"""The LoRA adapters of a loaded model: on the host, by number, and in the slots of its layers.

Reading may happen on another thread; everything else belongs to the engine's. Which adapter gets which slot
is decided by the scheduler (``core.adapter_slots``).
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from quire_server.layers.linear import LinearLayer
from quire_server.layers.lora import AdaptedLinear, BatchAdapters
from quire_server.models import adapter_file
from quire_server.models.adapter_file import AdapterFile
from quire_server.models.decoder import Decoder


class Adapters:
    """``batch``: what a pass has to be given. ``shapes``: (out, in) of each matrix that may be adapted."""

    def __init__(
        self, model: Decoder, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        """Puts slots beside the layers of a filled model. ``device``: the GPU; None: a CPU computes."""
        self.batch = BatchAdapters(num_slots)
        self.max_rank = max_rank
        self.dtype = dtype
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

    def read(self, directory: Path) -> AdapterFile:
        """Read and check an adapter; from any thread. Raises errors of `quire_server.errors`."""
        return adapter_file.read(directory, self.shapes, self.max_rank, self.dtype)

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
