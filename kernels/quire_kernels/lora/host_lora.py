"""`HostLora`: the LoRA adapters of one linear layer on a CPU, and their product.

Only the part of a slot that its adapter uses is ever touched: memory for higher ranks is not taken from the
machine. On a GPU the layout is that of `add_lora`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire_kernels.cpu.native import NATIVE


class HostLora:
    """Slots for adapters of a layer [in] -> [sum of ``sizes``], one A and one B for each part of it."""

    def __init__(
        self, num_slots: int, rank: int, in_size: int, sizes: Sequence[int], dtype: torch.dtype
    ) -> None:
        out_size = sum(sizes)
        self.sizes, self.rank = tuple(sizes), rank
        self.a = _untouched((num_slots, len(sizes) * rank, in_size), dtype)
        self.b = _untouched((num_slots, rank, out_size), dtype)
        self.used = torch.zeros(num_slots, dtype=torch.int64)
        self.ends = torch.tensor(np.cumsum(sizes), dtype=torch.int64)
        self._is_native = NATIVE is not None and NATIVE.supports_lora(self.a, self.ends)

    def fill(self, slot: int, factors: Sequence[tuple[Tensor, Tensor] | None], rank: int) -> None:
        """Give a slot an adapter: A [rank, in] and B [size, rank] of each part, B multiplied by its scaling;
        None: the adapter leaves the part as it is.
        """
        self.used[slot] = rank if any(pair is not None for pair in factors) else 0
        begin = 0
        for part, (size, pair) in enumerate(zip(self.sizes, factors, strict=True)):
            a = self.a[slot, part * self.rank : part * self.rank + rank]
            b = self.b[slot, :rank, begin : begin + size]
            begin += size
            if pair is not None:
                a.copy_(pair[0])
                b.copy_(pair[1].T)
            elif self.used[slot]:
                a.zero_()
                b.zero_()

    def add(self, y: Tensor, x: Tensor, of: Tensor) -> None:
        """y [T, out] += B (A x) with each token's adapter, in place. ``of`` i64 [T]: its slot, -1: none."""
        if self._is_native and NATIVE is not None and NATIVE.supports_lora_rows(x, y, self.a):
            NATIVE.add_lora(y, x, self.a, self.b, self.used, of, self.ends, len(self.sizes), self.rank)
        else:
            self._add_by_torch(y, x, of)

    def _add_by_torch(self, y: Tensor, x: Tensor, of: Tensor) -> None:
        for slot in of.unique().tolist():
            if slot < 0 or not (rank := int(self.used[slot])):
                continue
            rows = (of == slot).nonzero()[:, 0]
            given, begin = x[rows].float(), 0
            for part, size in enumerate(self.sizes):
                a = self.a[slot, part * self.rank : part * self.rank + rank].float()
                b = self.b[slot, :rank, begin : begin + size].float()
                columns = slice(begin, begin + size)
                y[rows, columns] = (y[rows, columns].float() + given @ a.T @ b).to(y.dtype)
                begin += size


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages are taken from the machine when they are written to."""
    as_integers = {4: np.int32, 2: np.int16}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, as_integers)).view(dtype)
