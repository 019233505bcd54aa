"""Starts an engine and its ranks as the supervisor does, for benches that measure the engine without HTTP.

The processes, their environment and the directory that they share are the server's; only rank 0 is
``bench.ordered_engine`` in place of ``quire_server.engine``. Each wait has a deadline, and when an engine is
closed none of its processes is left.
"""

import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.ordered_engine import DEFAULT, SOCKET
from quire_server import termination
from quire_server.supervisor import processes
from quire_server.supervisor.children import Children
from quire_server.supervisor.run_dir import run_dir

_ROOT = Path(__file__).resolve().parent.parent
LOAD_SECONDS, ANSWER_SECONDS = 180.0, 180.0
_MEMORY = Path("/dev/shm")
_TICK_SECONDS = 0.2


class EngineLostError(RuntimeError):
    """A process of an engine ended, or did not answer in time."""


class EngineProcesses:
    """A loaded engine of ``ranks`` processes, which share ``threads`` threads. ``variables`` are added to
    their environment.
    """

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        *,
        ranks: int = 1,
        threads: int = 2,
        communicator: str = DEFAULT,
        variables: Mapping[str, str] | None = None,
        load_seconds: float = LOAD_SECONDS,
    ) -> None:
        self._name = f"the engine of {ranks} ranks ({communicator})"
        self._children, self._stack, self._buffer = Children(), ExitStack(), b""
        try:
            self._start(
                model, flags, ranks, {"OMP_NUM_THREADS": str(threads), **(variables or {})}, communicator
            )
            self._connect(load_seconds)
            self.facts: dict[str, Any] = self._answer(load_seconds)
        except BaseException:
            self.close()
            raise

    def _start(
        self, model: Path, flags: Sequence[str], ranks: int, variables: Mapping[str, str], communicator: str
    ) -> None:
        self._directory, _ = self._stack.enter_context(run_dir((_MEMORY, Path(tempfile.gettempdir()))))
        self._listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(str(self._directory / SOCKET))
        self._listener.listen(1)
        given = {**os.environ, "PYTHONPATH": str(_ROOT), **variables}
        environ = processes.engine_environ(ranks, given)
        arguments = [str(model), *flags, "--tensor-parallel-size", str(ranks)]
        directory = str(self._directory)
        rank_0 = [directory, communicator, *arguments]
        self._children.spawn(processes.ENGINE, "bench.ordered_engine", rank_0, environ)
        for rank in range(1, ranks):
            name, of_rank = processes.rank_name(rank), [str(rank), directory, *arguments]
            self._children.spawn(name, "quire_server.engine.rank", of_rank, environ)

    def _connect(self, seconds: float) -> None:
        self._listener.settimeout(_TICK_SECONDS)
        deadline = time.monotonic() + seconds
        while True:
            try:
                connection, _ = self._listener.accept()
                break
            except TimeoutError:
                self._refuse_late(deadline, "did not load")
        self._connection = self._stack.enter_context(connection)
        self._connection.settimeout(_TICK_SECONDS)

    def run(
        self,
        length: int,
        count: int,
        new: int,
        *,
        temperature: float = 0.0,
        seconds: float = ANSWER_SECONDS,
    ) -> list[dict[str, Any]]:
        """The steps of a batch: see ``ordered_engine.run``."""
        order = {"length": length, "count": count, "new": new, "temperature": temperature}
        self._connection.sendall(json.dumps(order).encode() + b"\n")
        steps: list[dict[str, Any]] = self._answer(seconds)
        return steps

    def _answer(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            try:
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                self._refuse_late(deadline, "did not answer")
                continue
            if not data:
                raise EngineLostError(f"Rank 0 of {self._name} ended.{self._why()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _refuse_late(self, deadline: float, what: str) -> None:
        """Raise where a process has ended, or the deadline has passed."""
        if ended := [exited.name for exited in self._children.reap()]:
            raise EngineLostError(f"Of {self._name} ended: {', '.join(ended)}.{self._why()}")
        if time.monotonic() >= deadline:
            raise EngineLostError(f"{self._name} {what} in time.{self._why()}")

    def _why(self) -> str:
        failure = termination.find_failure(self._directory)
        return "" if failure is None else f" {failure.message}"

    def close(self) -> None:
        """End all processes."""
        self._children.kill_all()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
