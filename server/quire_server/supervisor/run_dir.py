"""The directory that the processes of one server share: heartbeats, sockets, and why a process ended.

In memory where possible, so that a heartbeat never waits for a disk. A supervisor that is killed cannot
remove its directory, and a pod's memory outlives its containers: the next one removes what no process holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire_server.errors import DiskError
from quire_server.health.heartbeat import SharedState

_PREFIX = "quire-"
_LOCK = "lock"
_ROOM_BYTES = 1 << 20  # for heartbeats, sockets, addresses of ranks, and why a process ended


@contextlib.contextmanager
def run_dir(parents: Sequence[Path]) -> Iterator[tuple[Path, SharedState]]:
    """A new directory with its shared state, in the first of these that has room; gone afterwards. Raises
    DiskError where none has.
    """
    with contextlib.ExitStack() as lock:
        path, state = _create(parents, lock)
        try:
            yield path, state
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _create(parents: Sequence[Path], lock: contextlib.ExitStack) -> tuple[Path, SharedState]:
    first, *others = parents
    path = None
    try:
        _sweep(first)
        if shutil.disk_usage(first).free < _ROOM_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=first))
        state = SharedState.create(path)
        new = path / f"{_LOCK}.new"
        file = lock.enter_context(new.open("wb"))
        fcntl.flock(file, fcntl.LOCK_EX)
        new.rename(path / _LOCK)  # from now on it is seen, and is locked
    except OSError as error:
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
        if others:
            return _create(others, lock)
        raise DiskError(
            f"The server has no room for its run directory in {first} ({error.strerror}): free some, or "
            "raise the memory limit."
        ) from None
    return path, state


def _sweep(parent: Path) -> None:
    """Remove the directories of servers that were killed."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        # OSError: its server runs, it is another user's, or another server has just removed it.
        with contextlib.suppress(OSError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
