"""Starting and reaping the processes of one server.

Called by the supervisor's loop. posix_spawn, never fork: a child starts from nothing, with default signals,
in a process group of its own (a Ctrl-C in a terminal reaches the supervisor alone).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire_server import orphan


@dataclass(frozen=True)
class Exit:
    """A child that is no more, with the status of os.waitpid."""

    name: str
    wait_status: int


class Children:
    """The live children by name."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def spawn(self, name: str, module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start `python -m module arguments...`, bound to our life."""
        pid = os.posix_spawn(
            sys.executable,
            # -P: the current directory (a model's, perhaps) holds no modules of ours.
            [sys.executable, "-Pm", orphan.__name__, module, *arguments],
            {**environ, orphan.PARENT_VARIABLE: str(os.getpid())},
            setpgroup=0,
            setsigmask=[],
            setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE],
        )
        self._names[pid] = name

    def reap(self) -> list[Exit]:
        """Who has ended. Adopted orphans (we may be pid 1) are reaped too and not mentioned."""
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
        """Send a signal to one child, if it lives."""
        for pid, child in self._names.items():
            if child == name:
                os.kill(pid, signum)

    def kill_all(self) -> None:
        """End every child now and wait for it."""
        for pid in self._names:
            os.kill(pid, signal.SIGKILL)
        for pid in list(self._names):
            os.waitpid(pid, 0)
        self._names.clear()

    def alive(self, name: str) -> bool:
        """True until `reap` has seen its end."""
        return name in self._names.values()
