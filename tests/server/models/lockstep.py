"""Ranks of one model as threads of one process, which add their parts when all have arrived."""

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_SECONDS = 60  # until a rank that makes another call than the others fails them all


class ThreadRanks:
    """A communicator for each rank of ``size`` that share layers, in each of ``pipeline`` stages. ``calls``:
    (kind, bytes of a part) of every exchange of rank 0, in order.
    """

    def __init__(self, size: int, pipeline: int = 1) -> None:
        self.size = size
        self.calls: list[tuple[str, int]] = []
        self._barriers = [threading.Barrier(size) for _ in range(pipeline)]
        self._parts: list[Tensor] = [torch.empty(0)] * size * pipeline
        self.sent: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
            pair: queue.SimpleQueue() for pair in itertools.product(range(size * pipeline), repeat=2)
        }
        self.communicators = [_Rank(self, rank) for rank in range(size * pipeline)]

    def exchange(self, kind: str, rank: int, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, in their order."""
        self._parts[rank] = part.clone()  # ends a recording, which would have no exchange in it
        if rank == 0:
            self.calls.append((kind, part.nbytes))
        stage = rank // self.size
        self._barriers[stage].wait(_SECONDS)
        parts = [part.clone() for part in self._parts[stage * self.size : (stage + 1) * self.size]]
        self._barriers[stage].wait(_SECONDS)
        return parts

    def take(self, sender: int, receiver: int) -> Tensor:
        """What one rank has sent to another, when it is there."""
        return self.sent[sender, receiver].get(timeout=_SECONDS)

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Call one function for each rank, side by side."""
        with ThreadPoolExecutor(len(functions)) as pool:
            return [future.result() for future in [pool.submit(function) for function in functions]]


class _Rank:
    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self.calls = self.bytes = 0
        self.waited = 0.0

    def all_reduce(self, part: Tensor) -> Tensor:
        if self._ranks.size == 1:
            return part
        self._count(part)
        return torch.stack(self._ranks.exchange("all_reduce", self._rank, part)).sum(0)

    def gather_to_leader(self, part: Tensor) -> Tensor:
        self._count(part)
        parts = self._ranks.exchange("gather", self._rank, part)
        return torch.cat(parts, -1) if self._rank % self._ranks.size == 0 else part

    def send(self, tensor: Tensor, rank: int) -> None:
        self._count(tensor)
        self._ranks.sent[self._rank, rank].put(tensor.clone())

    def recv(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        tensor = self._ranks.take(rank, self._rank)
        assert (tensor.shape, tensor.dtype) == (tuple(shape), dtype)
        self._count(tensor)
        return tensor

    def abort(self) -> None:
        for barrier in self._ranks._barriers:
            barrier.abort()

    def _count(self, part: Tensor) -> None:
        self.calls += 1
        self.bytes += part.nbytes
