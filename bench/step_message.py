"""What it costs rank 0 to send a step to the other ranks (used by ``bench.distributed``).

From the Step to the last acknowledgement: encoding, one unix socket for each peer, and in the peers'
processes decoding and an echo. With more processes than cores some of them wait for others, and other work
on the machine delays steps: so there is the fastest tenth beside the median.
"""

import itertools
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.compare import table
from bench.step_follower import AGAIN, PING
from quire_server.core.rank_step import RankStep
from quire_server.core.step import Step
from quire_server.engine.rank_channel import Channel, Patience
from quire_server.engine.step_codec import MAX_STEP_BYTES, StepEncoder
from quire_server.layers.parallel import DEADLINE

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 60
PEERS, REQUESTS = (1, 3), (1, 32, 256)


def decode_step(number: int, requests: int) -> RankStep:
    """A step in which every request gets one token, and every 16th a new block."""
    rows, ones = tuple(range(requests)), (1,) * requests
    new_blocks = tuple((row, 100 + row) for row in rows if row % 16 == number % 16)
    step = Step(number, (), new_blocks, rows, (700 + number % 64,) * requests, ones, ones)
    return RankStep(step, sampled=(90_000,) * requests)


class Times(NamedTuple):
    """Seconds of each step, of rank 0's part of it, of an empty round trip; bytes of the longest message."""

    steps: list[float]
    sent: list[float]
    pings: list[float]
    size: int


@contextmanager
def followers(peers: int) -> Iterator[list[Channel]]:
    """Processes that follow, and a channel to each. None of them is left."""
    channels, processes = list[Channel](), list[subprocess.Popen[bytes]]()
    try:
        for _ in range(peers):
            near, far = socket.socketpair()
            with far:
                command = [sys.executable, "-m", "bench.step_follower", str(far.fileno())]
                processes.append(subprocess.Popen(command, cwd=ROOT, pass_fds=[far.fileno()]))
            channels.append(Channel(near))
        yield channels
    finally:
        for channel in channels:
            channel.close()
        for process in processes:
            process.kill()
            process.wait()


def measure(channels: Sequence[Channel], requests: int, rounds: int) -> Times:
    """Steps and pings in turns, with the deadlines of ``RankGroup``."""
    encoder, times = StepEncoder(), Times([], [], [], 0)
    for channel in channels:
        channel.send(AGAIN)
        channel.receive(MAX_STEP_BYTES, START_SECONDS)
    for number in range(rounds):
        message = decode_step(number, requests)
        for taken, encode in ((times.steps, partial(encoder.encode, message)), (times.pings, _ping)):
            began_at = time.perf_counter()
            body = encode()
            for channel in channels:
                channel.send(body, DEADLINE)
            if body != PING:
                times.sent.append(time.perf_counter() - began_at)
            patience = Patience(DEADLINE)
            for channel in channels:
                channel.receive(MAX_STEP_BYTES, patience)
            taken.append(time.perf_counter() - began_at)
            times = times._replace(size=max(times.size, len(body)))
    return times


def _ping() -> bytes:
    return PING


HEADS = ["peers", "requests", "step, us", "sent, us", "ping, us", "bytes a request"]


def rows(rounds: int = 2000) -> list[list[str]]:
    """One for each number of peers and of requests: medians, and in parentheses the fastest tenth."""
    found = []
    with followers(max(PEERS)) as channels:
        for peers, requests in itertools.product(PEERS, REQUESTS):
            times = measure(channels[:peers], requests, rounds)
            figures = [
                f"{1e6 * statistics.median(each):.0f} ({1e6 * statistics.quantiles(each, n=10)[0]:.0f})"
                for each in (times.steps, times.sent, times.pings)
            ]
            found.append([str(peers), str(requests), *figures, f"{times.size / requests:.1f}"])
    return found


def report(rounds: int = 2000) -> str:
    """The table and what it means."""
    notes = (
        "Medians, and in parentheses what the fastest tenth stays below. `step`: from the Step to the last "
        "acknowledgement; `sent`: until rank 0 computes; `ping`: an empty round trip. Every request decodes, "
        f"all in the rows that they had before. {rounds:,} steps each; with 3 peers there are 4 processes."
    )
    return f"{table(HEADS, rows(rounds))}\n\n{notes}"
