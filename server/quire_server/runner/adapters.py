"""The LoRA adapters of a loaded model, or of one rank's part of it: on the host, by number, and in the slots
of its layers.

Files are read on a thread of their own; everything else belongs to the engine's. Which adapter gets which
slot is decided by the scheduler (``core.adapter_slots``).
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from quire_server.core.topology import Slice
from quire_server.errors import QuireServerError
from quire_server.layers.linear import LinearLayer
from quire_server.layers.lora import AdaptedLinear, BatchAdapters
from quire_server.models import adapter_file
from quire_server.models.adapter_file import AdapterFile, HostRoom, Matrix
from quire_server.models.decoder import Decoder
from quire_server.text.fair_executor import FairExecutor

logger = logging.getLogger(__name__)

_MAX_REASON = 1000  # characters

_HOST_SHARE = 4  # a quarter of the host's memory beside the model is for adapters


def whole_matrices(model: Decoder) -> dict[str, Matrix]:
    """The matrices of a model, with or without content, that may be adapted, by name."""
    found: dict[str, Matrix] = {}

    def note(prefixes: Sequence[str], inner: LinearLayer, in_size: int, sizes: Sequence[int]) -> LinearLayer:
        found.update({name: Matrix(size, in_size) for name, size in zip(prefixes, sizes, strict=True)})
        return inner

    for layer in model.layers:
        layer.adapt(note)
    return found


def divided(whole: Mapping[str, Matrix], parts: Mapping[str, Slice], model: Decoder) -> dict[str, Matrix]:
    """The matrices of a whole model, as a rank that has ``model`` computes their ``parts``."""
    own = whole_matrices(model)
    return {
        name: matrix._replace(part=parts.get(name), is_here=name in own) for name, matrix in whole.items()
    }


def reason_of(error: BaseException, directory: str) -> str:
    """Why an adapter is not loaded, as its state says; what was not foreseen goes to the log. A file of a
    user must not end the engine, whatever is wrong with it: what is said of it has a bound, since it goes
    into messages that have one.
    """
    if isinstance(error, QuireServerError):
        text = str(error)
        return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."
    logger.error("an adapter is not read", exc_info=error, extra={"directory": directory})
    return f"It could not be read ({type(error).__name__}): see the server's log."


class Adapters:
    """``batch``: what a pass has to be given. ``matrices``: those that may be adapted. ``room``: of the host,
    for those that are loaded; none before `limit`.
    """

    def __init__(
        self,
        model: Decoder,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | None,
        matrices: Mapping[str, Matrix] | None = None,
    ) -> None:
        """Puts slots beside the layers of a filled model. ``device``: the GPU; None: a CPU computes.
        ``matrices``: of the whole model, where this is one rank's part of it.
        """
        self.matrices = whole_matrices(model) if matrices is None else matrices
        self.batch = BatchAdapters(num_slots)
        self.max_rank = max_rank
        self.dtype = dtype
        self.room = HostRoom(0)
        self.is_on_host = device is None
        self._num_slots = num_slots
        self._linears: list[AdaptedLinear] = []
        self._files: dict[int, AdapterFile] = {}
        self._thread: FairExecutor | None = None

        def adapt(
            prefixes: Sequence[str], inner: LinearLayer, in_size: int, sizes: Sequence[int]
        ) -> AdaptedLinear:
            made = AdaptedLinear(prefixes, inner, in_size, sizes, self.batch, max_rank, dtype, device)
            self._linears.append(made)
            return made

        for layer in model.layers:
            layer.adapt(adapt)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot on this rank, at the highest rank of adapters."""
        numbers = sum(linear.in_size * len(linear.sizes) + sum(linear.sizes) for linear in self._linears)
        return numbers * self.max_rank * self.dtype.itemsize

    def limit(self, available: int) -> int:
        """Set the room on the host by the bytes that are left there. Returns what adapters may take of them,
        slots included where a CPU computes, whose slots are filled later.
        """
        slots = self._num_slots * self.slot_bytes
        on_host = slots if self.is_on_host else 0
        self.room.limit = max(0, available - on_host) // _HOST_SHARE
        logger.info("room for adapters", extra={"slot_bytes": slots, "host_bytes": self.room.limit})
        return on_host + self.room.limit

    def read(self, directory: Path, replaced: int = 0) -> AdapterFile:
        """Read and check an adapter; from any thread. ``replaced``: bytes that are free once it is there.
        Raises errors of `quire_server.errors`.
        """
        return adapter_file.read(directory, self.matrices, self.max_rank, self.dtype, self.room, replaced)

    def begin(self, number: int, directory: Path, replaces: int = 0) -> "Future[AdapterFile]":
        """The same on a thread of its own. The adapter may be added under this number. ``replaces``: the
        number of one that is removed then.
        """
        self._thread = self._thread or FairExecutor("adapters")
        old = self._files.get(replaces)
        replaced = 0 if old is None else old.size
        return self._thread.submit("", partial(self.read, directory, replaced))

    def exchange(self) -> bool:
        """Take part in what several ranks do; whether to call it again soon. One rank has no others."""
        return False

    def add(self, number: int, file: AdapterFile) -> None:
        """Keep an adapter on the host."""
        self._files[number] = file

    def remove(self, number: int) -> None:
        """Drop it, if it was added; no request may use it any more."""
        self._files.pop(number, None)

    @torch.inference_mode()
    def load(self, slot: int, number: int) -> None:
        """Copy an adapter to a slot."""
        file = self._files[number]
        for linear in self._linears:
            linear.fill(slot, file.factors, file.rank)
