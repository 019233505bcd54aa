"""Processes that are the ranks of a group, each with one thread, and run what a test gives them."""

import functools
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from quire_kernels import (
    NATIVE,
    CollectiveError,
    ShmGroup,
    create_shm_region,
    has_shm_collectives,
    record,
    silu_mul,
)

_SECONDS = 120  # until a process that says nothing fails the test: a busy machine loads torch slowly


class RankProcesses:
    """``size`` processes; a function runs on all of them, called with what ``join`` makes of its rank's place
    in a new group, whose memory ``create`` makes.
    """

    def __init__(
        self,
        size: int,
        join: Callable[..., Any] = ShmGroup,
        create: Callable[[int], int] = create_shm_region,
    ) -> None:
        self.size, self._create = size, create
        # Forked of a process that has loaded torch once, in place of seconds of CPU for each rank.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["quire_kernels"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, join), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, deadline: float = 60) -> list[Any]:
        """What the function returned on each rank, or its CollectiveError; another error fails the test."""
        self.start(function, *args, deadline=deadline)
        return [self.receive(rank) for rank in range(self.size)]

    def start(self, function: Callable[..., Any], *args: Any, deadline: float = 60) -> None:
        """Start it on all ranks, once all have joined."""
        descriptor = self._create(self.size)
        for pipe in self._pipes:
            pipe.send((f"/proc/{os.getpid()}/fd/{descriptor}", deadline))
        assert [self.receive(rank) for rank in range(self.size)] == ["joined"] * self.size
        os.close(descriptor)
        for pipe in self._pipes:
            pipe.send((function, args))

    def receive(self, rank: int) -> Any:
        """The next thing that the rank says."""
        assert self._pipes[rank].poll(_SECONDS), f"rank {rank} says nothing"
        kind, value = self._pipes[rank].recv()
        assert kind != "failed", value
        return CollectiveError(*value) if kind == "error" else value

    def has_said(self, rank: int) -> bool:
        """Whether the rank has said something that was not received yet."""
        return self._pipes[rank].poll()

    def send(self, rank: int, what: object) -> None:
        """To the function that runs on the rank."""
        self._pipes[rank].send(what)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send the signal and wait until it has taken effect."""
        process = self._processes[rank]
        assert process.pid is not None
        os.kill(process.pid, number)
        if number == signal.SIGKILL:
            process.join(_SECONDS)
            assert process.exitcode == -signal.SIGKILL
        while number == signal.SIGSTOP and _state(process.pid) != "T":
            os.sched_yield()

    def pids(self) -> list[int]:
        """Of all processes."""
        return [process.pid or 0 for process in self._processes]

    def close(self) -> None:
        """End them all."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


@contextmanager
def rank_processes(
    size: int, join: Callable[..., Any] = ShmGroup, create: Callable[[int], int] = create_shm_region
) -> Iterator[RankProcesses]:
    """They end with the context."""
    made = RankProcesses(size, join, create)
    try:
        yield made
    finally:
        made.close()


def where_supported(test: Callable[..., None]) -> Callable[..., None]:
    """The test; on a machine without the CPU kernels, that a group is refused there in plain words."""

    @functools.wraps(test)
    def refused(**_: object) -> None:
        with pytest.raises(RuntimeError, match="where the CPU kernels are built"):
            create_shm_region(2)

    return test if has_shm_collectives() else refused


def where_recorded(test: Callable[..., None]) -> Callable[..., None]:
    """The test; on a CPU without AVX2, that a computation is made there and not recorded."""

    @functools.wraps(test)
    def made(**_: object) -> None:
        assert record(lambda: silu_mul(torch.ones(1, 64))) is None

    return test if NATIVE is not None else made


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def _serve(pipe: Connection, rank: int, join: Callable[..., Any]) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            path, deadline = pipe.recv()
        except EOFError:
            sys.exit()
        try:
            descriptor = os.open(path, os.O_RDWR)
            group = join(descriptor, rank, deadline=deadline)
            os.close(descriptor)
            pipe.send(("result", "joined"))
            function, args = pipe.recv()
            with torch.inference_mode():
                pipe.send(("result", function(group, pipe, *args)))
        except CollectiveError as error:
            pipe.send(("error", (str(error), error.rank, error.call)))
        except Exception:
            pipe.send(("failed", traceback.format_exc()))
