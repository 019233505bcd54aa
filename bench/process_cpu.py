"""CPU seconds of other processes between two moments in the past (used by ``bench.http_load``).

A load generator reports only afterwards when it began and ended, and its start costs more than the load. So
the counters of /proc are sampled all the time and evaluated between the two moments.
"""

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path

PERIOD = 0.1
TICK = os.sysconf("SC_CLK_TCK")


def used(pid: int) -> float:
    """User and system seconds of a process with all its threads; 0 if it has ended."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(after_name[11]) + int(after_name[12])) / TICK


def session_of(leader: int) -> list[int]:
    """The processes of a session."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == leader:
                    members.append(int(entry.name))
            except ProcessLookupError:
                continue
    return members


def busy() -> float:
    """CPU seconds that this machine has spent since it started."""
    _, user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split(maxsplit=10)[:10]
    return sum(map(int, (user, nice, system, irq, softirq))) / TICK


class CpuLog(threading.Thread):
    """Samples CPU seconds by name while it is entered: of single processes, of one session ("client"), and of
    all other processes ("others"), which should have none for a valid measurement.
    """

    def __init__(self, processes: Mapping[str, int], session: int) -> None:
        super().__init__(daemon=True)
        self._processes, self._session = processes, session
        self._done = threading.Event()
        self._moments: list[float] = []
        self._used: list[dict[str, float]] = []
        self._seen: dict[int, float] = {}  # of the session, including processes that have ended

    def __enter__(self) -> "CpuLog":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        while not self._done.wait(PERIOD):
            for pid in session_of(self._session):
                self._seen[pid] = max(self._seen.get(pid, 0.0), used(pid))
            self._moments.append(time.time())
            now = {name: used(pid) for name, pid in self._processes.items()}
            now |= {"client": sum(self._seen.values())}
            self._used.append(now | {"others": busy() - sum(now.values())})

    def between(self, start: float, end: float) -> dict[str, float]:
        """CPU seconds by name between two moments of ``time.time``."""
        first = self._used[max(0, bisect_left(self._moments, start) - 1)]
        last = self._used[min(bisect_left(self._moments, end), len(self._used) - 1)]
        return {name: last[name] - first[name] for name in first}
