"""What it costs rank 0 to send a step to the other ranks (used by ``bench.distributed``).

From the Step to the last acknowledgement: encoding, one unix socket for each peer, and in the peers'
processes decoding and an echo. `sent` is rank 0's part, until it computes; `ping` an empty
round trip. Medians over many steps.
"""

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial

from quire_server.core.rank_step import Echo, RankLimits, RankStep
from quire_server.core.step import Step
from quire_server.engine.rank_channel import Channel, ChannelClosedError
from quire_server.engine.step_codec import MAX_STEP_BYTES, StepDecoder, StepEncoder, encode_echo

LIMITS = RankLimits(512, 1 << 16, 0, 0, 4096, 1 << 17)
PING = b"ping"


def follow(connection: socket.socket) -> None:
    """Decode what arrives and echo it, as another rank does."""
    channel, decoder = Channel(connection), StepDecoder(LIMITS)
    try:
        while True:
            body = channel.receive(MAX_STEP_BYTES)
            if body == PING:
                channel.send(PING)
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


def measure(peers: int, requests: int, rounds: int) -> tuple[float, float, float, int]:
    """(microseconds of a step, of rank 0's part of it, of an empty round trip, bytes of a message)."""
    context = multiprocessing.get_context("spawn")
    pairs = [socket.socketpair() for _ in range(peers)]
    processes = [context.Process(target=follow, args=(far,)) for _, far in pairs]
    for process in processes:
        process.start()
    channels = [Channel(near) for near, _ in pairs]
    for _, far in pairs:
        far.close()
    encoder, steps, sent, pings, size = StepEncoder(), list[float](), list[float](), list[float](), 0
    for number in range(rounds):
        message = decode_step(number, requests)
        kinds: tuple[tuple[list[float], Callable[[], bytes]], ...] = (
            (steps, partial(encoder.encode, message)),
            (pings, lambda: PING),
        )
        for times, encode in kinds:
            began_at = time.perf_counter()
            body = encode()
            for channel in channels:
                channel.send(body)
            if body != PING:
                sent.append(time.perf_counter() - began_at)
            for channel in channels:
                channel.receive(MAX_STEP_BYTES)
            times.append(time.perf_counter() - began_at)
            size = max(size, len(body))
    for channel in channels:
        channel.close()
    for process in processes:
        process.join()
    skipped = rounds // 10
    medians = [1e6 * statistics.median(times[skipped:]) for times in (steps, sent, pings)]
    return medians[0], medians[1], medians[2], size


HEADS = ["peers", "requests", "step, us", "sent, us", "ping, us", "bytes a request"]


def rows(rounds: int = 2000) -> list[list[str]]:
    """One for each number of peers and of requests."""
    found = []
    for peers in (1, 3):
        for requests in (1, 32, 256):
            step, sent, ping, size = measure(peers, requests, rounds)
            figures = (f"{figure:.0f}" for figure in (requests, step, sent, ping))
            found.append([str(peers), *figures, f"{size / requests:.1f}"])
    return found
