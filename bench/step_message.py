"""What it costs rank 0 to send a step to the other ranks (used by ``bench.distributed``).

From the Step to the last acknowledgement: encoding, one unix socket for each peer, and in the peers'
processes decoding and an echo. With more processes than cores some of them wait for others, and other work
on the machine delays steps: so there is the fastest tenth beside the median.
"""

import itertools
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from bench.compare import table
from quire_server.core.rank_step import Echo, RankLimits, RankStep
from quire_server.core.step import Step
from quire_server.engine.rank_channel import Channel, ChannelClosedError, Patience
from quire_server.engine.step_codec import MAX_STEP_BYTES, StepDecoder, StepEncoder, encode_echo
from quire_server.layers.parallel import DEADLINE

LIMITS = RankLimits(512, 1 << 16, 0, 0, 4096, 1 << 17)
PING, AGAIN = b"ping", b"again"  # again: from the first step on
START_SECONDS = 60
PEERS, REQUESTS = (1, 3), (1, 32, 256)


def follow(connection: socket.socket) -> None:
    """Decode what arrives and echo it, as another rank does."""
    channel, decoder = Channel(connection), StepDecoder(LIMITS)
    try:
        while True:
            body = channel.receive(MAX_STEP_BYTES)
            if body in (PING, AGAIN):
                channel.send(body)
                decoder = StepDecoder(LIMITS) if body == AGAIN else decoder
                continue
            decoder.decode(body)
            channel.send(encode_echo(Echo(decoder.sequence, decoder.digest)))
    except ChannelClosedError:
        return


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
    context = multiprocessing.get_context("spawn")
    pairs = [socket.socketpair() for _ in range(peers)]
    processes = [context.Process(target=follow, args=(far,)) for _, far in pairs]
    for process in processes:
        process.start()
    channels = [Channel(near) for near, _ in pairs]
    for _, far in pairs:
        far.close()
    try:
        yield channels
    finally:
        for channel in channels:
            channel.close()
        for process in processes:
            process.join(5)
            process.kill()


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
