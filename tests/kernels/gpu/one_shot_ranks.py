"""Ranks that add by the one-shot kernel: on a GPU as streams of one process; without one as processes, whose
interpreters run at the same time and wait for one another through memory that they share.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Protocol

import torch
from torch import Tensor

from quire_kernels.one_shot_all_reduce_triton import one_shot_all_reduce_triton
from quire_kernels.one_shot_place import OneShotPlace, one_shot_region_bytes
from tests.kernels.rank_processes import RankProcesses, rank_processes

if not torch.cuda.is_available():  # it patches the pinned triton version; a GPU machine may have another one
    from tests.kernels.gpu.interpreter import interpreted

#: Calls that all programs have made before the first: the third one passes the largest integer.
FIRST = (1 << 31) - 3


class Ranks(Protocol):
    """Ranks of one group."""

    def sums(self, calls: list[list[Tensor]]) -> list[list[Tensor]]:
        """For each rank what it has after each call, given all ranks' parts of each call."""


def create_regions(ranks: int) -> int:
    """The descriptor of all ranks' regions, one after the other."""
    descriptor = os.memfd_create("one-shot")
    os.ftruncate(descriptor, ranks * one_shot_region_bytes(ranks))
    return descriptor


class InterpretedRank:
    """One rank in a process of its own."""

    def __init__(self, descriptor: int, rank: int, *, deadline: float) -> None:
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.regions = torch.frombuffer(self._memory, dtype=torch.uint8)
        ranks = next(n for n in range(1, 99) if n * one_shot_region_bytes(n) == len(self._memory))
        self.regions = self.regions.view(ranks, -1)
        self.place = place(list(self.regions), rank)


def place(regions: list[Tensor], rank: int) -> OneShotPlace:
    """A rank's place, after FIRST calls."""
    made = OneShotPlace.of([each.data_ptr() for each in regions], rank, regions[rank])
    made.epochs.fill_(FIRST)
    made.flags.fill_(FIRST)
    return made


def sums_of_a_rank(rank: InterpretedRank, pipe: Connection, calls: list[list[Tensor]]) -> list[Tensor]:
    """What this rank has after each call."""
    with interpreted():
        parts = [each[rank.place.rank].clone() for each in calls]
        return [one_shot_all_reduce_triton(part, rank.place) for part in parts]


class Interpreted:
    """Ranks as processes."""

    def __init__(self, processes: RankProcesses) -> None:
        self.processes = processes

    def sums(self, calls: list[list[Tensor]]) -> list[list[Tensor]]:
        return self.processes.run(sums_of_a_rank, calls)


class Streams:
    """Ranks as streams of one GPU, which run side by side."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def sums(self, calls: list[list[Tensor]]) -> list[list[Tensor]]:
        size = one_shot_region_bytes(self._ranks)
        regions = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(self._ranks)]
        places = [place(regions, rank) for rank in range(self._ranks)]
        streams = [torch.cuda.Stream() for _ in places]  # type: ignore[no-untyped-call]
        parts = [[each[rank].cuda() for each in calls] for rank in range(self._ranks)]
        torch.cuda.synchronize()
        for call in range(len(calls)):
            for mine, each, stream in zip(parts, places, streams, strict=True):
                with torch.cuda.stream(stream):
                    one_shot_all_reduce_triton(mine[call], each)
        torch.cuda.synchronize()
        return [[part.cpu() for part in mine] for mine in parts]


@contextmanager
def one_shot_ranks(ranks: int) -> Iterator[Ranks]:
    """They end with the context."""
    if torch.cuda.is_available():
        yield Streams(ranks)
        return
    with rank_processes(ranks, InterpretedRank, create_regions) as processes:
        yield Interpreted(processes)
