"""A rank of a real server is killed or stopped again and again (used by ``bench.distributed``): how long
until all processes of the server have ended and nothing of it is left, and until it is ready again.

A kubelet restarts the container at once; here the bench does.
"""

import contextlib
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from bench.compare import table
from tests.server import tiny_model
from tests.server.launch import NO_TLS, Server

RANKS, LOSSES, STREAMS = 2, 50, 3
FLAGS = ("--dtype", "float32", "--quantization", "none", "--tensor-parallel-size", str(RANKS))
#: What is lost -> seconds that the server may need until all its processes have ended.
LIMITS = {signal.SIGKILL: 2.0, signal.SIGSTOP: 5.0}
_ASKED = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
_READY_SECONDS, _END_SECONDS = 180, 30


class Stream(threading.Thread):
    """A client that reads a long answer to its end."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._url = server.url + "/v1/completions"
        self.lines = list[str]()
        self.start()

    def run(self) -> None:
        """Read until the connection ends."""
        body = {**_ASKED, "max_tokens": 1900, "stream": True}
        with (
            contextlib.suppress(httpx.TransportError),  # what came until then is looked at
            httpx.stream("POST", self._url, json=body, timeout=30, verify=NO_TLS) as response,
        ):
            self.lines.extend(line for line in response.iter_lines() if line)

    @property
    def has_error(self) -> bool:
        """Whether the last event was an error."""
        self.join(_END_SECONDS)
        events = [line for line in self.lines if "[DONE]" not in line]
        return bool(events) and '"error"' in events[-1]


def shared_files(pids: list[int]) -> set[Path]:
    """Files in memory that these processes have mapped."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line}


def left_behind(server: Server, files: set[Path], run_dir: Path, pids: list[int]) -> list[str]:
    """What is left of a server that has ended: processes, files in memory, ports."""
    found = [str(path) for path in {run_dir, *files} if path.exists()]
    found += [f"pid {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    for port in (server.port, server.health_port):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                found.append(f"port {port}")
    return found


class Losses:
    """What was measured with one signal."""

    def __init__(self) -> None:
        self.ended, self.restarted, self.loads = list[float](), list[float](), list[float]()  # seconds
        self.lost_at = 0.0
        self.without_error, self.left, self.wrong = 0, list[str](), 0

    def lose(self, server: Server, signum: signal.Signals, rank: int, dice: random.Random) -> None:
        """Lose the rank beside streams, and wait until all has ended."""
        pids, run_dir = list(server.children().values()), server.run_dir()
        files, victim = shared_files(pids), server.ranks()[rank]
        streams = [Stream(server) for _ in range(STREAMS)]
        server.wait("streams", lambda: all(len(stream.lines) > 5 for stream in streams))
        time.sleep(dice.uniform(0, 0.3))  # so that ranks are lost at any point of a step
        self.lost_at = time.monotonic()
        os.kill(victim, signum)
        server.wait_end(_END_SECONDS)
        self.ended.append(time.monotonic() - self.lost_at)
        self.without_error += sum(not stream.has_error for stream in streams)
        self.left += left_behind(server, files, run_dir, pids)

    def ready(self, seconds: float) -> None:
        """The server is ready so many seconds after its start, the first or the one after a loss."""
        if self.lost_at:
            self.restarted.append(time.monotonic() - self.lost_at)
            self.loads.append(seconds)

    def row(self, signum: signal.Signals) -> list[str]:
        """The row of the table."""
        within = sum(seconds <= LIMITS[signum] for seconds in self.ended)
        beside = [all_ - load for all_, load in zip(self.restarted, self.loads, strict=True)]
        return [
            signum.name,
            f"{within} of {len(self.ended)} within {LIMITS[signum]:g} s",
            f"{statistics.median(self.ended):.2f} / {max(self.ended):.2f}",
            f"{self.without_error} of {STREAMS * len(self.ended)}",
            str(len(self.left)),
            str(self.wrong),
            f"{statistics.median(self.restarted):.1f} / {max(self.restarted):.1f}",
            f"{statistics.median(beside):.1f} / {max(beside):.1f}",
        ]


HEADS = [
    "a rank gets",
    "all ended",
    "all ended, s: median / slowest",
    "streams without an error event",
    "left behind",
    "other answers after",
    "loss to ready, s: median / slowest",
    "of it not the load",
]


def report(losses: int = LOSSES) -> str:
    """Each signal so many times, at random moments, the ranks in turns."""
    measured, dice = dict[signal.Signals, Losses](), random.Random(11)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.write(Path(folder) / "tiny")
        golden = ""
        for signum in LIMITS:
            found = measured[signum] = Losses()
            for number in range(losses + 1):  # the last one is not lost
                directory = Path(folder) / f"{signum.name}-{number}"
                directory.mkdir()
                started_at = time.monotonic()
                with Server(model, directory, *FLAGS) as server:
                    server.wait_ready(_READY_SECONDS)
                    found.ready(time.monotonic() - started_at)
                    choices = server.post("/v1/completions", {**_ASKED, "max_tokens": 40}).json()["choices"]
                    golden = golden or choices[0]["text"]
                    found.wrong += choices[0]["text"] != golden
                    if number < losses:
                        found.lose(server, signum, number % RANKS, dice)
                        print(f"{signum.name} {number}: {found.ended[-1]:.2f} s", file=sys.stderr, flush=True)
    made = table(HEADS, [found.row(signum) for signum, found in measured.items()])
    loads = [seconds for found in measured.values() for seconds in found.loads]
    notes = (
        f"{losses} of each, ranks in turns at random moments: a tiny model on {RANKS} ranks, {STREAMS} "
        f"streams beside. From a start to ready it took {statistics.median(loads):.1f} s (median; slowest "
        f"{max(loads):.1f}). The bench starts the server again at once; a kubelet waits 10 s before the "
        "second restart of a container, and longer before later ones."
    )
    return "\n\n".join([made, notes, *(what for found in measured.values() for what in found.left)])
