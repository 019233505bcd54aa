"""LoRA adapters beside linear layers: each token of a batch gets the update of its own adapter, or none.

``AdaptedLinear`` wraps any linear layer, whatever the form of its weights. Which adapter a token has is in
``BatchAdapters``, which the executor sets for each pass. A CPU computes with ``HostLora``, a GPU with the
grouped kernels of ``add_lora``.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire_kernels import HostLora, RowGroups, add_lora, group_rows
from quire_server.layers.linear import Fp8Forward, LinearLayer

#: A [rank, in], and B [out, rank] multiplied by its scaling.
Factors = tuple[Tensor, Tensor]

_FEW_TOKENS, _BLOCK, _LARGE_BLOCK = 256, 16, 64


class BatchAdapters:
    """The adapters of the tokens that the next pass computes. ``on_host``: i64 [T], the slot of each token,
    -1 for none; None where no token has one. ``on_gpu``: the same, grouped.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.on_host: Tensor | None = None
        self.on_gpu: RowGroups | None = None

    def group(self, slots: Tensor) -> None:
        """Set ``on_gpu`` from i64 [T] on the device, by operations that a graph can capture."""
        size = _BLOCK if len(slots) <= _FEW_TOKENS else _LARGE_BLOCK
        self.on_gpu = group_rows(slots.to(torch.int32), self.num_slots, size)


class AdaptedLinear:
    """A linear layer with slots for adapters. ``prefixes``: of its parts in the checkpoint."""

    forward_fp8: Fp8Forward | None = None  # adapters take the rows before they are quantised

    def __init__(
        self,
        prefixes: Sequence[str],
        inner: LinearLayer,
        in_size: int,
        sizes: Sequence[int],
        batch: BatchAdapters,
        rank: int,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        """``device``: the GPU; None: a CPU computes."""
        self.prefixes, self.in_size, self.sizes = tuple(prefixes), in_size, tuple(sizes)
        self._inner, self._batch, self._rank = inner, batch, rank
        self._host: HostLora | None = None
        if device is None:
            self._host = HostLora(batch.num_slots, rank, in_size, sizes, dtype)
        else:
            shape = (batch.num_slots, len(sizes) * rank, in_size)
            self._a = torch.zeros(shape, dtype=dtype, device=device)
            self._b = torch.zeros((batch.num_slots, sum(sizes), rank), dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        y = self._inner(x)
        if self._host is not None and self._batch.on_host is not None:
            self._host.add(y, x, self._batch.on_host)
        elif self._host is None and self._batch.on_gpu is not None:
            add_lora(y, x, self._a, self._b, self._batch.on_gpu, self.sizes)
        return y

    def fill(self, slot: int, factors: Mapping[str, Factors], rank: int) -> None:
        """Give a slot an adapter; parts that are not in ``factors`` stay as they are."""
        own = [factors.get(prefix) for prefix in self.prefixes]
        if self._host is not None:
            self._host.fill(slot, own, rank)
            return
        self._a[slot].zero_()
        self._b[slot].zero_()
        begin = 0
        for part, (size, pair) in enumerate(zip(self.sizes, own, strict=True)):
            if pair is not None:
                self._a[slot, part * self._rank : part * self._rank + rank].copy_(pair[0], non_blocking=True)
                self._b[slot, begin : begin + size, :rank].copy_(pair[1], non_blocking=True)
            begin += size

    def targets(self) -> dict[str, Tensor]:
        """The layer's own; adapters are filled one by one."""
        return self._inner.targets()

    def finish(self) -> None:
        """The layer is finished already."""

    def weights(self) -> Sequence[Tensor]:
        """The layer's own."""
        return self._inner.weights()
