"""Starting and reaping the processes of one server.

posix_spawn, never fork: a child starts with a clean memory image, default signal handlers, and a process
group of its own (so that a Ctrl-C in a terminal reaches the supervisor alone).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire_server import parent_death


@dataclass(frozen=True)
class Exit:
    """A child that has ended, with its status from os.waitpid."""

    name: str
    wait_status: int


class Children:
    """The running child processes by name."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def spawn(self, name: str, module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start `python -m module arguments...` as a child that dies with this process."""
        pid = os.posix_spawn(
            sys.executable,
            # -P: never import modules from the current directory, which may be a model's.
            [sys.executable, "-Pm", parent_death.__name__, module, *arguments],
            {**environ, parent_death.PARENT_VARIABLE: str(os.getpid())},
            setpgroup=0,
            setsigmask=[],
            setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE],
        )
        self._names[pid] = name

    def reap(self) -> list[Exit]:
        """The children that have ended. As pid 1 it also reaps orphans, which are not in the result."""
        ended: list[Exit] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            name = self._names.pop(pid, None)
            if name is not None:
                ended.append(Exit(name, status))

    def signal(self, name: str, signum: int) -> None:
        """Send a signal to one child, if it is running."""
        for pid, child in self._names.items():
            if child == name:
                os.kill(pid, signum)

    def kill_all(self) -> None:
        """Kill every child and wait for it."""
        for pid in self._names:
            os.kill(pid, signal.SIGKILL)
        for pid in list(self._names):
            os.waitpid(pid, 0)
        self._names.clear()

    def alive(self, name: str) -> bool:
        """Whether the child is running, as far as `reap` knows."""
        return name in self._names.values()
