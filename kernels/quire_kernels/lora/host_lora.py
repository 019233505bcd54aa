"""`HostLora`: the LoRA adapters of one linear layer on a CPU, and their product.

The kernel reads the factors of a slot in the order in which they are packed. Only as much of a slot as its
adapter uses is ever touched: memory for higher ranks is not taken from the machine. On a GPU the layout is
that of `add_lora`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire_kernels.cpu.native import NATIVE

_LANES, _PAIR = 16, 2  # of the kernel; without it, factors are not packed


class HostLora:
    """Slots for adapters of a layer [in] -> [sum of ``sizes``], one A and one B for each part of it. The A of
    a slot is [ranks of all parts / 2, in / 16, 2, 16], its B [out / 16, rank, 16].
    """

    def __init__(
        self, num_slots: int, rank: int, in_size: int, sizes: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.sizes, self.in_size = tuple(sizes), in_size
        self.ends = torch.tensor(np.cumsum(sizes), dtype=torch.int64)
        self._is_native = NATIVE is not None and NATIVE.supports_lora(in_size, self.ends, dtype)
        self._lanes, self._pair = (_LANES, _PAIR) if self._is_native else (1, 1)
        self.width = self._padded(len(sizes) * rank)
        self.a = _untouched((num_slots, self.width * in_size), dtype)
        self.b = _untouched((num_slots, rank * sum(sizes)), dtype)
        self.used = torch.zeros(num_slots, dtype=torch.int64)

    def fill(self, slot: int, factors: Sequence[tuple[Tensor, Tensor] | None], rank: int) -> None:
        """Give a slot an adapter: A [rank, in] and B [size, rank] of each part, B multiplied by its scaling;
        None: the adapter leaves the part as it is.
        """
        self.used[slot] = rank if any(pair is not None for pair in factors) else 0
        if not self.used[slot]:
            return
        to_a, to_b = self._views(slot)
        ranks = to_a.shape[0] * self._pair
        a = torch.zeros(ranks, self.in_size, dtype=to_a.dtype)
        begin = 0
        for part, (size, pair) in enumerate(zip(self.sizes, factors, strict=True)):
            if pair is None:
                b = torch.zeros(size, rank)
            else:
                a[part * rank : (part + 1) * rank], b = pair
            first, end = begin // self._lanes, (begin + size) // self._lanes
            to_b[first:end].copy_(b.view(-1, self._lanes, rank).transpose(1, 2))
            begin += size
        to_a.copy_(a.view(-1, self._pair, self.in_size // self._lanes, self._lanes).transpose(1, 2))

    def add(self, y: Tensor, x: Tensor, of: Tensor) -> None:
        """y [T, out] += B (A x) with each token's adapter, in place. ``of`` i64 [T]: its slot, -1: none."""
        if self._is_native and NATIVE is not None and NATIVE.supports_lora_rows(x, y, self.a):
            NATIVE.add_lora(y, x, self.a, self.b, self.used, of, self.ends, self.width)
        else:
            self._add_by_torch(y, x, of)

    def _add_by_torch(self, y: Tensor, x: Tensor, of: Tensor) -> None:
        for slot in of.unique().tolist():
            if slot < 0 or not (rank := int(self.used[slot])):
                continue
            rows = (of == slot).nonzero()[:, 0]
            given, begin = x[rows].float(), 0
            packed_a, packed_b = self._views(slot)
            every_a = packed_a.transpose(1, 2).reshape(-1, self.in_size).float()
            every_b = packed_b.transpose(1, 2).reshape(-1, rank).float()
            for part, size in enumerate(self.sizes):
                a, b = every_a[part * rank : (part + 1) * rank], every_b[begin : begin + size]
                columns = slice(begin, begin + size)
                y[rows, columns] = (y[rows, columns].float() + given @ a.T @ b.T).to(y.dtype)
                begin += size

    def _views(self, slot: int) -> tuple[Tensor, Tensor]:
        """A and B of a slot, as they are packed."""
        rank, out_size = int(self.used[slot]), sum(self.sizes)
        ranks = self._padded(len(self.sizes) * rank)
        a = self.a[slot, : ranks * self.in_size]
        a = a.view(-1, self.in_size // self._lanes, self._pair, self._lanes)
        return a, self.b[slot, : rank * out_size].view(-1, rank, self._lanes)

    def _padded(self, ranks: int) -> int:
        return -(-ranks // self._pair) * self._pair


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages are taken from the machine when they are written to."""
    as_integers = {4: np.int32, 2: np.int16}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, as_integers)).view(dtype)
