"""Requests that arrive at random times, whether or not earlier ones are answered: an open loop (a section of
``bench.cpu``).

Arrivals are a Poisson process, and lengths of prompts and answers have log-normal distributions, all from one
seed: each engine gets the same requests at the same times. Knows nothing of HTTP.
"""

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from bench import compare
from bench.baselines import Engine
from bench.engine import Quire

RATES = (0.5, 2.0, 8.0)  # requests a second
COUNT, STREAMS = 32, 32
PROMPT, ANSWER, SPREAD = (16, 128, 768), (4, 48, 256), 0.8  # shortest, median and longest


class Arrival(NamedTuple):
    """A request that comes ``at`` these seconds."""

    at: float
    prompt: list[int]
    new_tokens: int


Times = list[list[float]]  # of each request's tokens, in seconds since the begin
Serve = Callable[[Sequence[Arrival]], Times]


def trace(rate: float, count: int, vocab_size: int, seed: int = 1) -> list[Arrival]:
    """``count`` requests, ``rate`` of them a second on average; the same ones at any rate."""
    chance = random.Random(seed)
    found, now = list[Arrival](), 0.0
    for _ in range(count):
        now += chance.expovariate(rate)
        prompt = [chance.randrange(vocab_size) for _ in range(_length(chance, *PROMPT))]
        found.append(Arrival(now, prompt, _length(chance, *ANSWER)))
    return found


def _length(chance: random.Random, shortest: int, median: int, longest: int) -> int:
    return min(longest, max(shortest, round(chance.lognormvariate(math.log(median), SPREAD))))


class Batched(Protocol):
    """An engine that takes requests while others run."""

    def begin(self) -> None:
        """Forget all requests."""

    def has_room(self) -> bool:
        """Whether it takes another request now."""

    def add(self, number: int, arrival: Arrival) -> None:
        """Take this request."""

    def step(self) -> Iterable[int] | None:
        """The requests that have got a token, each as often as it got one; None: none is left."""


class Scheduled:
    """Quire, whose own scheduler decides what runs."""

    def __init__(self, engine: Quire) -> None:
        self._engine = engine

    def begin(self) -> None:
        """As in ``Batched``."""
        self._scheduler = self._engine.scheduler()

    def has_room(self) -> bool:
        """Others wait in the scheduler's queue."""
        return True

    def add(self, number: int, arrival: Arrival) -> None:
        """As in ``Batched``."""
        self._scheduler.add(self._engine.request(number, arrival.prompt, arrival.new_tokens))

    def step(self) -> Iterable[int] | None:
        """As in ``Batched``."""
        if (step := self._scheduler.schedule()) is None:
            return None
        events = self._scheduler.commit(step, self._engine.runner.run(step))
        return [int(event.request_id) for event in events for _ in event.token_ids]


class Slots(Protocol):
    """An engine with a fixed number of sequences."""

    streams: int

    def clear(self) -> None: ...
    def prefill(self, slot: int, prompt: list[int]) -> int: ...
    def decode(self, rows: Mapping[int, tuple[int, int]]) -> dict[int, int]: ...
    def release(self, slot: int) -> None: ...


class Slotted:
    """An engine with slots: a new prompt is computed in one piece, then all running requests take a step."""

    def __init__(self, engine: Slots) -> None:
        self._engine = engine

    def begin(self) -> None:
        """As in ``Batched``."""
        self._engine.clear()
        self._free = list(range(self._engine.streams))
        self._new = list[tuple[int, Arrival]]()
        self._running = dict[int, tuple[int, int, int, int]]()  # slot: request, token, position, tokens left

    def has_room(self) -> bool:
        """As in ``Batched``."""
        return len(self._new) < len(self._free)

    def add(self, number: int, arrival: Arrival) -> None:
        """As in ``Batched``."""
        self._new.append((number, arrival))

    def step(self) -> Iterable[int] | None:
        """As in ``Batched``."""
        if self._new:
            number, arrival = self._new.pop(0)
            slot = self._free.pop()
            token = self._engine.prefill(slot, arrival.prompt)
            self._keep(slot, number, token, len(arrival.prompt), arrival.new_tokens - 1)
            return [number]
        if not self._running:
            return None
        rows = {slot: (token, position) for slot, (_, token, position, _) in self._running.items()}
        tokens = self._engine.decode(rows)
        before, self._running = self._running, {}
        for slot, (number, _, position, left) in before.items():
            self._keep(slot, number, tokens[slot], position + 1, left - 1)
        return [number for number, *_ in before.values()]

    def _keep(self, slot: int, number: int, token: int, position: int, left: int) -> None:
        if left:
            self._running[slot] = number, token, position, left
        else:
            self._engine.release(slot)
            self._free.append(slot)


def serve(engine: Batched, requests: Sequence[Arrival]) -> Times:
    """Each request is added when it arrives, or when there is room for it."""
    engine.begin()
    times: Times = [[] for _ in requests]
    waiting, start = list(enumerate(requests)), time.perf_counter()
    while True:
        while waiting and waiting[0][1].at <= time.perf_counter() - start and engine.has_room():
            engine.add(*waiting.pop(0))
        served = engine.step()
        now = time.perf_counter() - start
        for number in served or ():
            times[number].append(now)
        if served is None:
            if not waiting:
                return times
            time.sleep(max(0.0, waiting[0][1].at - now))


class OneAfterTheOther:
    """An engine that takes no request while others run. Nobody waits here for a request to arrive: the times
    are those of its prefill and steps, begun when it had come and the one before was complete. The same
    requests at another rate have the same times.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._taken: dict[tuple[tuple[int, ...], int], list[float]] = {}

    def __call__(self, requests: Sequence[Arrival]) -> Times:
        """A ``Serve``."""
        times, free = list[list[float]](), 0.0
        for arrival in requests:
            prefill, *steps = self._seconds(arrival)
            begun = max(free, arrival.at)
            times.append(list(itertools.accumulate([begun + prefill, *steps])))
            free = times[-1][-1]
        return times

    def _seconds(self, arrival: Arrival) -> list[float]:
        key = tuple(arrival.prompt), arrival.new_tokens
        if key not in self._taken:
            prefill, steps = self._engine.run([arrival.prompt], [arrival.new_tokens])
            self._taken[key] = [prefill, *(taken for _, taken in steps)]
        return self._taken[key]


def table(servers: Mapping[str, Serve], vocab_size: int, count: int = COUNT) -> str:
    """Seconds to the first token, and milliseconds for each further one: median and 90th percentile."""
    rows = []
    for rate in RATES:
        requests = trace(rate, count, vocab_size)
        for name, served in servers.items():
            times = served(requests)
            first = [each[0] - one.at for each, one in zip(times, requests, strict=True)]
            further = [(each[-1] - each[0]) / (len(each) - 1) * 1e3 for each in times]
            total = sum(map(len, times)) / max(each[-1] for each in times)
            rows.append([f"{rate:g}/s, {name}", _two(first, 2), _two(further, 0), f"{total:.0f}"])
    heads = ["arrivals, engine", "to the first token, s: 50 % (90 %)", "a further token, ms: 50 % (90 %)"]
    note = (
        f"{count} requests; prompts of {PROMPT[0]} to {PROMPT[2]} tokens (median {PROMPT[1]}), answers of "
        f"{ANSWER[0]} to {ANSWER[2]} (median {ANSWER[1]}), log-normal; temperature 0.7, top_p 0.95."
    )
    return f"{compare.table([*heads, 'tok/s'], rows)}\n\n{note}"


def _two(values: list[float], digits: int) -> str:
    tenths = statistics.quantiles(values, n=10)
    return f"{statistics.median(values):.{digits}f} ({tenths[8]:.{digits}f})"
