"""The gateway's policies before simulated replicas: python -m bench.gateway_simulator

Eight replicas, each with an LRU prefix cache and a FIFO prefill; prompts arrive by a Poisson process; each
gateway has its own counts, and the replicas' load as it was at the last poll. The policies are the gateway's
own code. Beside them are KubeAI's and SGLang's rules, written from their descriptions for this comparison
alone. The same seed gives the same numbers. Writes bench/results/gateway_routing.md.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import os
import platform
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from xxhash import xxh3_64_intdigest

from quire_gateway.llm_route import Strategy
from quire_gateway.replica import Endpoint, Replica
from quire_gateway.routing.hash_ring import HashRing
from quire_gateway.routing.prefix_index import PrefixIndex
from quire_gateway.routing.prompt_blocks import digests
from quire_gateway.routing.router import Pick, RequestFacts, Router, Stateless
from quire_gateway.routing.strategies import router_for

RESULTS = Path(__file__).parent / "results" / "gateway_routing.md"
REPLICAS, TOKENS_A_SECOND, BLOCK_TOKENS = 8, 12_000, 256  # a block is 1 KB of text
CACHE_BLOCKS = 1200  # of each replica
DECODE_SECONDS = 1.0
POLL_SECONDS, SYNC_SECONDS = 1.0, 0.2
WARM_UP = 0.2  # of a trace, which is not counted
SEED = 11


@dataclass(frozen=True)
class Request:
    """One prompt as the numbers of its blocks, and its session."""

    arrival: float
    blocks: tuple[int, ...]
    session: str

    @property
    def facts(self) -> RequestFacts:
        """What a gateway sees of it."""
        return RequestFacts("m", ("".join(map(_text, self.blocks)),), self.session)


@functools.lru_cache(maxsize=1 << 12)
def _text(block: int) -> str:
    return f"{block:08x}" * 128


Trace = Callable[[float, random.Random], Iterator[Request]]


def b2b(seconds: float, chance: random.Random) -> Iterator[Request]:
    """150 tenants, each with 6,000 tokens that all its prompts begin with."""
    fresh = itertools.count(1 << 20)
    for now in _arrivals(seconds, 20.0, chance):
        tenant = chance.randrange(150)
        own = (tenant * 100 + number for number in range(23))
        yield Request(now, (*own, *itertools.islice(fresh, 5)), f"t{tenant}")


def chat(seconds: float, chance: random.Random) -> Iterator[Request]:
    """Conversations that grow by 1,000 tokens a turn, up to ten turns, after a common system prompt."""
    fresh = itertools.count(1 << 20)
    pending: list[tuple[float, int, tuple[int, ...], int]] = [
        (start, number, (1, 2), chance.randint(2, 10))
        for number, start in enumerate(_arrivals(seconds, 3.5, chance))
    ]
    while pending:
        now, number, history, turns = heapq.heappop(pending)
        blocks = (*history, *itertools.islice(fresh, 4))
        yield Request(now, blocks, f"c{number}")
        if turns > 1 and (later := now + chance.expovariate(1 / 15)) < seconds:
            heapq.heappush(pending, (later, number, blocks, turns - 1))


def templates(seconds: float, chance: random.Random) -> Iterator[Request]:
    """400 templates of 2,000 tokens, some far more used than others, and 256 tokens of each prompt's own."""
    fresh = itertools.count(1 << 20)
    weights = list(itertools.accumulate(1 / rank for rank in range(1, 401)))
    for now in _arrivals(seconds, 90.0, chance):
        (template,) = chance.choices(range(400), cum_weights=weights)
        own = (template * 100 + number for number in range(8))
        yield Request(now, (*own, next(fresh)), f"u{chance.randrange(500)}")


def no_reuse(seconds: float, chance: random.Random, load: float) -> Iterator[Request]:
    """Prompts of 512 to 3,584 tokens that have nothing in common."""
    fresh = itertools.count(1 << 20)
    rate = load * REPLICAS * TOKENS_A_SECOND / (8 * BLOCK_TOKENS)
    for number, now in enumerate(_arrivals(seconds, rate, chance)):
        yield Request(now, tuple(itertools.islice(fresh, chance.randint(2, 14))), f"n{number}")


def _arrivals(seconds: float, rate: float, chance: random.Random) -> Iterator[float]:
    now = chance.expovariate(rate)
    while now < seconds:
        yield now
        now += chance.expovariate(rate)


TRACES: dict[str, Trace] = {
    "B2B, 150 tenants x 6k": b2b,
    "chat, multi-turn": chat,
    "API templates, Zipf": templates,
    "no reuse, 50 % load": functools.partial(no_reuse, load=0.5),
    "no reuse, 85 % load": functools.partial(no_reuse, load=0.85),
}


class BoundedHash(Stateless):
    """KubeAI's rule: the first 100 characters of the prompt on a ring, loads bounded by 1.25 of the mean."""

    def __init__(self) -> None:
        self._ring = HashRing(SEED)

    def keep(self, uids: Collection[str]) -> None:
        """These are all replicas."""
        self._ring.keep(uids)

    def pick(self, facts: RequestFacts, candidates: Sequence[Replica], now: float) -> Pick | None:
        """The home of the prompt's beginning."""
        key = xxh3_64_intdigest("".join(facts.prompt)[:100].encode(), SEED)
        total = sum(one.load(now) for one in candidates)
        home = self._ring.home(key, {one.endpoint.uid: one for one in candidates}, total, now)
        return Pick(home, "home") if home else None


class Thresholds(Stateless):
    """SGLang's rule: the replica with most of the prompt where that is more than half of it, the least busy
    one otherwise; and the least busy one for all while the busiest has 32 more, and 1.1 times as many.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._index = PrefixIndex()

    def keep(self, uids: Collection[str]) -> None:
        """These are all replicas."""
        self._index.keep(uids)

    def pick(self, facts: RequestFacts, candidates: Sequence[Replica], now: float) -> Pick | None:
        """The choice by thresholds."""
        blocks = digests(facts, SEED)
        match = self._index.match(blocks)
        known = [match.depth(self._index.bit(one.endpoint.uid)) for one in candidates]
        loads = [one.load(now) for one in candidates]
        least, most, best = min(loads), max(loads), max(known)
        chosen = self._chance.choice(
            [one for one, load in zip(candidates, loads, strict=True) if load == least]
        )
        if best > 0.5 * len(blocks) and not (most - least > 32 and most > 1.1 * least):
            chosen = candidates[known.index(best)]
        self._index.add(chosen.endpoint.uid, blocks)
        return Pick(chosen, "threshold")


@dataclass
class Engine:
    """One replica: what is cached, until when its prefill is busy, and what it has in flight."""

    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)  # by the digest of the prompt so far
    busy_until: float = 0.0
    in_flight: int = 0

    def serve(self, blocks: Sequence[int], now: float) -> tuple[int, float]:
        """How many blocks were cached, and the end of the prefill."""
        known = next((at for at, one in enumerate(blocks) if one not in self.cache), len(blocks))
        for one in reversed(blocks):
            self.cache[one] = None
            self.cache.move_to_end(one)
        while len(self.cache) > CACHE_BLOCKS:
            self.cache.popitem(last=False)
        seconds = max(1, len(blocks) - known) * BLOCK_TOKENS / TOKENS_A_SECOND
        self.busy_until = max(now, self.busy_until) + seconds
        return known, self.busy_until


@dataclass
class Gateway:
    """One gateway: its counts of the replicas, its policy, and the choices not yet sent to its peers."""

    replicas: list[Replica]
    router: Router
    outbox: list[tuple[str, Sequence[int]]]


@dataclass(frozen=True)
class Outcome:
    """Of the requests after the warm-up."""

    hit: float  # share of blocks that were cached
    ideal: float  # with one cache that forgets nothing
    p50: float  # TTFT in seconds
    p90: float
    skew: float  # requests of the busiest replica to the mean


NewRouter = Callable[[random.Random, Callable[[str, Sequence[int]], None]], Router]


def ours(strategy: str) -> NewRouter:
    """A policy of the gateway."""
    return lambda chance, publish: router_for(Strategy(strategy), chance, SEED, publish=publish)


def simulate(trace: Trace, new_router: NewRouter, gateways: int, *, sync: bool, seconds: float) -> Outcome:
    """Run a trace to its end."""
    world = World(new_router, gateways)
    events: list[tuple[float, int, Callable[[float], None]]] = []
    order = itertools.count()

    def at(when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(events, (when, next(order), action))

    for number in range(int(seconds / POLL_SECONDS)):
        at(number * POLL_SECONDS, world.poll)
    for number in range(int(seconds / SYNC_SECONDS) if sync else 0):
        at(number * SYNC_SECONDS, world.sync)
    requests = list(trace(seconds, random.Random(SEED)))
    for request in requests:
        at(request.arrival, functools.partial(world.ask, request, at))
    while events:
        now, _, action = heapq.heappop(events)
        action(now)
    return world.outcome(WARM_UP * seconds)


class World:
    """Engines and gateways."""

    def __init__(self, new_router: NewRouter, gateways: int) -> None:
        self.engines = [Engine() for _ in range(REPLICAS)]
        self._chance = random.Random(SEED)
        self._served: list[tuple[float, int, int, int, float, int]] = []
        self._seen: set[int] = set()
        self.gateways = []
        for number in range(gateways):
            outbox: list[tuple[str, Sequence[int]]] = []
            publish = functools.partial(lambda box, *record: box.append(record), outbox)
            router = new_router(random.Random(SEED + number), publish)
            replicas = [Replica(Endpoint(str(uid), "", 0, 0)) for uid in range(REPLICAS)]
            router.keep([one.endpoint.uid for one in replicas])
            self.gateways.append(Gateway(replicas, router, outbox))

    def poll(self, now: float) -> None:
        """Every gateway reads the load of every engine."""
        for gateway in self.gateways:
            for replica, engine in zip(gateway.replicas, self.engines, strict=True):
                replica.polled(engine.in_flight, now)

    def sync(self, now: float) -> None:
        """Every gateway hears what the others chose."""
        for sender in self.gateways:
            for uid, blocks in sender.outbox:
                for other in self.gateways:
                    if other is not sender:
                        other.router.learn(uid, blocks[:256])
            sender.outbox.clear()

    def ask(self, request: Request, at: Callable[[float, Callable[[float], None]], None], now: float) -> None:
        """A request comes to any of the gateways."""
        gateway = self._chance.choice(self.gateways)
        choice = gateway.router.pick(request.facts, gateway.replicas, now)
        assert choice is not None
        uid = int(choice.replica.endpoint.uid)
        engine, blocks = self.engines[uid], digests(request.facts, 0)
        known, end = engine.serve(blocks, now)
        ideal = next((index for index, one in enumerate(blocks) if one not in self._seen), len(blocks))
        self._seen.update(blocks)
        self._served.append((now, known, ideal, len(blocks), end - now, uid))
        choice.replica.in_flight += 1
        engine.in_flight += 1

        def ended(_: float) -> None:
            choice.replica.in_flight -= 1
            engine.in_flight -= 1
            gateway.router.answered(choice, known * BLOCK_TOKENS)

        at(end + DECODE_SECONDS, ended)

    def outcome(self, since: float) -> Outcome:
        """The numbers."""
        counted = [one for one in self._served if one[0] >= since]
        blocks = sum(one[3] for one in counted)
        ttft = statistics.quantiles([one[4] for one in counted], n=100)
        by_replica = [sum(one[5] == uid for one in counted) for uid in range(REPLICAS)]
        return Outcome(
            sum(one[1] for one in counted) / blocks,
            sum(one[2] for one in counted) / blocks,
            ttft[49],
            ttft[89],
            max(by_replica) / statistics.mean(by_replica),
        )


POLICIES: dict[str, tuple[NewRouter, int, bool]] = {
    "RoundRobin (1)": (ours("RoundRobin"), 1, False),
    "RoundRobin (3)": (ours("RoundRobin"), 3, False),
    "LeastLoad (3)": (ours("LeastLoad"), 3, False),
    "PowerOfTwo (3)": (ours("PowerOfTwo"), 3, False),
    "Session (3)": (ours("Session"), 3, False),
    "KubeAI's rule (3)": (lambda chance, publish: BoundedHash(), 3, False),
    "SGLang's rule (1)": (lambda chance, publish: Thresholds(chance), 1, False),
    "SGLang's rule (3)": (lambda chance, publish: Thresholds(chance), 3, False),
    "Prefix (1)": (ours("Prefix"), 1, False),
    "Prefix, no sync (3)": (ours("Prefix"), 3, False),
    "**Prefix, sync (3)**": (ours("Prefix"), 3, True),
}


def table(seconds: float) -> str:
    """A row for each policy, a column for each trace."""
    rows: dict[str, list[str]] = {name: [] for name in POLICIES}
    ideals = []
    for trace in TRACES.values():
        for name, (new_router, gateways, sync) in POLICIES.items():
            found = simulate(trace, new_router, gateways, sync=sync, seconds=seconds)
            rows[name].append(
                f"{100 * found.hit:.1f} % / {found.p50:.2f} / {found.p90:.2f} / {found.skew:.2f}"
            )
        ideals.append(100 * found.ideal)
    names = (f"{name}, ideal {ideal:.0f} %" for name, ideal in zip(TRACES, ideals, strict=True))
    head = f"| policy (gateways) | {' | '.join(names)} |\n|{'---|' * (len(TRACES) + 1)}"
    return "\n".join([head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())])


def cost() -> str:
    """A row for each kind of prompt: the CPU of a pick, most of which is hashing."""
    rows = []
    for kilobytes in (1, 100):
        for number in (8, 100):
            replicas = [Replica(Endpoint(str(uid), "", 0, 0)) for uid in range(number)]
            cells = [_microseconds(strategy, kilobytes, replicas) for strategy in ("Prefix", "PowerOfTwo")]
            rows.append(f"| {kilobytes} KB | {number} | {' | '.join(f'{cell:.0f}' for cell in cells)} |")
    return "\n".join(["| prompt | replicas | Prefix, us | PowerOfTwo, us |", "|---|---|---|---|", *rows])


def _microseconds(strategy: str, kilobytes: int, replicas: Sequence[Replica]) -> float:
    """The median of the CPU of picks, half of whose prompts were seen before."""
    router = router_for(Strategy(strategy), random.Random(SEED), SEED)
    router.keep([one.endpoint.uid for one in replicas])
    spent = []
    for number in range(600):
        prompt = "".join(map(_text, range(number // 2 * 1000, number // 2 * 1000 + kilobytes)))
        facts = RequestFacts("m", ("user", prompt))
        begun = time.thread_time()
        router.pick(facts, replicas, 0.0)
        spent.append(time.thread_time() - begun)
    return 1e6 * statistics.median(spent)


REPORT = f"""# What the gateway's policies do

`{{command}}`, {{day}}; the simulation is computed, and the same on every machine.
{REPLICAS} replicas, prefill of {TOKENS_A_SECOND:,} tokens a second each, a cache (LRU) of
{CACHE_BLOCKS * BLOCK_TOKENS:,} tokens each, {{seconds:.0f}} s of each trace, of which the first fifth is not
counted. Load is polled every {POLL_SECONDS:g} s; with sync gateways hear of each other's choices
every {SYNC_SECONDS:g} s. Each answer counts at its replica for {DECODE_SECONDS:g} s after its prefill.
Others' rules are written from their descriptions; they are not their programs.

A cell: share of the prompts' blocks that came from a cache / TTFT p50 / p90 in s / requests of the busiest
replica to the mean. Ideal: one cache that forgets nothing.

{{table}}

## The cost of a choice

CPU of one pick in us, the median of 600, measured on {{machine}}, shared, load {{load:.1f}}.

{{cost}}
"""


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300.0, help="of each trace")
    seconds = parser.parse_args().seconds
    text = REPORT.format(
        command=f"python -m bench.gateway_simulator --seconds {seconds:g}",
        day=datetime.now(UTC).date(),
        seconds=seconds,
        table=table(seconds),
        machine=f"{os.cpu_count()} CPUs ({platform.machine()}), Python {platform.python_version()}",
        load=os.getloadavg()[0],
        cost=cost(),
    )
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
