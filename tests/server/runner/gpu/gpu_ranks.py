"""Ranks on GPUs in one process, which compute one after the other: rank 0's runner, and those that follow it.

Each rank is a thread, and one of them runs at a time: until it waits for the others, in an exchange or for
the next step. So Triton's interpreter, which has one state for the process, computes shard after shard.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from quire_server.core.topology import Topology
from quire_server.engine import rank
from quire_server.engine.rank_channel import Channel, ChannelClosedError
from quire_server.engine.rank_group import RankGroup
from quire_server.models.decoder import Decoder
from quire_server.runner.gpu.device import Device
from quire_server.runner.loader import load_model
from quire_server.runner.model_runner import ModelRunner, RunnerConfig
from quire_server.runner.rank_executor import FollowerRunner
from quire_server.runner.ranks import Membership
from quire_server.runner.structured_outputs import Grammars
from quire_server.text.grammar import Vocabulary
from tests.server.models.lockstep import ThreadRanks


class Turns:
    """Who runs: one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Within it no other thread runs."""
        with self._lock:
            yield

    @contextmanager
    def others(self) -> Iterator[None]:
        """Within it the others run, and this one waits for something."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


class _Channel(Channel):
    def __init__(self, connection: socket.socket, turns: Turns) -> None:
        super().__init__(connection)
        self._turns = turns

    def receive(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with self._turns.others():
            return super().receive(max_bytes, timeout)


class _Exchange(ThreadRanks):
    def __init__(self, size: int, pipeline: int, turns: Turns) -> None:
        super().__init__(size, pipeline)
        self._turns = turns

    def exchange(self, kind: str, rank: int, part: Tensor) -> list[Tensor]:
        with self._turns.others():
            return super().exchange(kind, rank, part)

    def take(self, sender: int, receiver: int) -> Tensor:
        with self._turns.others():
            return super().take(sender, receiver)


class GpuRanks:
    """All ranks load, measure their memory and capture their graphs side by side, then follow rank 0.
    ``devices``: of the ranks, stage by stage; ``context``: entered by each thread but the caller's, which
    calls ``leading`` around what it does with the runner.
    """

    _shared: int | None = None  # the descriptor of rank 0

    def __init__(
        self,
        directory: Path,
        devices: Sequence[Device],
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        pipeline: int = 1,
        **options: object,
    ) -> None:
        size = len(devices)
        self.pipeline = pipeline
        settings: dict[str, object] = {
            "dtype": "float32",
            "max_num_seqs": 5,
            "tensor_parallel_size": size // pipeline,
            "pipeline_parallel_size": pipeline,
        }
        chosen = RunnerConfig(**(settings | options))  # type: ignore[arg-type]  # mixed values
        self.turns, self.devices, self._context = Turns(), devices, context
        self.exchange = _Exchange(size // pipeline, pipeline, self.turns)
        self._agreed: list[int] = []
        self._barrier = threading.Barrier(size)
        pairs = {number: socket.socketpair() for number in range(1, size)}
        self.channels = {number: _Channel(near, self.turns) for number, (near, _) in pairs.items()}
        self._ends = {number: _Channel(far, self.turns) for number, (_, far) in pairs.items()}
        group = RankGroup(self.channels)

        def lead() -> ModelRunner:
            place = self._place(0)
            parts = load_model(directory, chosen, lambda *_: None, devices[0], place)
            runner = ModelRunner(
                parts,
                chosen,
                Grammars(lambda: Vocabulary([b"a"] * 300, [0], [0])),
                ranks=place,
                followers=group,
            )
            runner.capture(lambda *_: None)
            return runner

        def follow(number: int) -> FollowerRunner:
            place = self._place(number)
            runner = FollowerRunner.load(directory, chosen, lambda *_: None, place, devices[number])
            runner.capture(lambda *_: None)
            return runner

        def in_turn(load: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                with context(), self.turns.mine():
                    return load()

            return run

        loads = [lead, *(partial(follow, number) for number in range(1, size))]
        self.runner, *self.followers = self.exchange.run([in_turn(each) for each in loads])
        self._threads = [
            threading.Thread(target=self._follow, args=(self._ends[number], runner), daemon=True)
            for number, runner in enumerate(self.followers, 1)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def models(self) -> list[Decoder]:
        """Of all ranks."""
        return [self.runner._model, *(each._rank._model for each in self.followers)]

    def leading(self) -> AbstractContextManager[None]:
        """Around what the caller does with the runner."""
        return self.turns.mine()

    def close(self) -> None:
        """End the followers."""
        for channel in self.channels.values():
            channel.close()
        for thread in self._threads:
            thread.join()

    def _place(self, number: int) -> Membership:
        topology = Topology(self.exchange.size, number, self.pipeline)
        return Membership(topology, self.exchange.communicators[number], self._agree)

    def _agree(self, num_blocks: int, shared: int | None) -> tuple[int, int | None]:
        self._agreed.append(num_blocks)
        self._shared = self._shared if shared is None else shared
        with self.turns.others():
            self._barrier.wait(60)
        if shared is None and self._shared is not None:  # rank 0 keeps its own
            shared = os.dup(self._shared)
        return min(self._agreed), shared

    def _follow(self, channel: Channel, runner: FollowerRunner) -> None:
        with self._context(), self.turns.mine(), contextlib.suppress(ChannelClosedError):
            rank.follow(channel, runner)
        channel.close()
