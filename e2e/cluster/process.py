"""Processes that outlive their parent: started once, recorded for good, stopped only if they are still the
same.

A process is itself by pid, start time and boot: a pid alone may be that of another program later. `lifecycle`
starts with it, `teardown` stops with it. Knows nothing of Kubernetes.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import NotReadyError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROGRAM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The record is written by the process itself before it becomes the program: at whatever moment we are killed,
# no program runs unrecorded. `exec` changes neither pid nor start time.
_RECORD_THEN_RUN = """
read -r stat </proc/self/stat && read -r boot <"$2" &&
printf '%s\\n%s\\n' "$stat" "$boot" >"$1.new" && mv "$1.new" "$1" && shift 2 && exec "$@"
"""


@dataclass(frozen=True)
class Record:
    """One started process."""

    name: str
    pid: int
    start_time: int  # clock ticks since boot
    boot_id: str


def start(records: Path, name: str, argv: list[str], log: Path) -> None:
    """Starts `argv` in a session of its own, its output appended to `log`."""
    records.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    wrapper = ["sh", "-c", _RECORD_THEN_RUN, "sh", str(records / name), str(BOOT_ID), *argv]
    writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.posix_spawn(
        "/bin/sh",
        wrapper,
        {"PATH": PROGRAM_PATH, "HOME": "/root"},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), writing, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    deadline = time.monotonic() + 10
    while not (records / name).exists():
        if time.monotonic() > deadline:
            raise NotReadyError(f"{name} did not start: see {log}")
        time.sleep(0.002)


def parse_record(name: str, text: str) -> Record:
    """A record file: the process's line of /proc/<pid>/stat, then the boot."""
    stat, boot_id = text.splitlines()
    pid, start_time, _ = parse_stat(stat)
    return Record(name, pid, start_time, boot_id)


def parse_stat(line: str) -> tuple[int, int, str]:
    """Pid, start time and state; the name between them may hold spaces and brackets."""
    head, _, tail = line.rpartition(")")
    fields = tail.split()
    return int(head.split(" ", 1)[0]), int(fields[19]), fields[0]


def recorded(records: Path) -> tuple[Record, ...]:
    """Every record of a directory."""
    if not records.is_dir():
        return ()
    files = [path for path in sorted(records.iterdir()) if path.suffix != ".new"]
    return tuple(parse_record(path.name, path.read_text()) for path in files)


def is_alive(record: Record, proc: Path = Path("/proc"), boot_id: Path = BOOT_ID) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    try:
        _, start_time, state = parse_stat((proc / str(record.pid) / "stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return False
    if state in "ZX" or start_time != record.start_time:
        return False
    return record.boot_id == boot_id.read_text().strip()


def stop(records: Iterable[Record], *, grace_seconds: float) -> None:
    """SIGTERM, then SIGKILL to what is left after the grace time; at once with none."""
    living = [record for record in records if is_alive(record)]
    if grace_seconds > 0:
        _signal(living, signal.SIGTERM)
        _wait(living, grace_seconds)
    _signal(living, signal.SIGKILL)
    _wait(living, 10)


def kill_all(find: Callable[[], set[int]], *, seconds: float = 10) -> None:
    """SIGKILL to every pid that `find` names, until it names none (what is dying may still fork)."""
    deadline = time.monotonic() + seconds
    while (pids := find()) and time.monotonic() < deadline:
        for pid in pids:
            _kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _signal(records: list[Record], number: signal.Signals) -> None:
    for record in records:
        if is_alive(record):
            _kill(record.pid, number)


def _kill(pid: int, number: signal.Signals) -> None:
    # It may have ended by itself, which is what we want.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait(records: list[Record], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(is_alive(record) for record in records) and time.monotonic() < deadline:
        time.sleep(0.02)
