"""A schema, an expression or a grammar that takes all the time it may have delays no other request: neither
the event loop nor the stream of another client. The limit is relative to the same run.
"""

import asyncio
import contextlib
import statistics
import time

import httpx

from tests.server.conftest import KEY
from tests.server.text.test_grammar_compiler import HOSTILE

HEADERS = {"authorization": f"Bearer {KEY}"}
STREAM = {"model": "tiny", "prompt": "Once", "max_tokens": 1900, "stream": True, "ignore_eos": True}
NUM_CALM = 300  # chunks
WORDS = [f"{number:x}" * 60 for number in range(4000, 4250)]  # 45 kB, which the engine builds, too
RULES = [f'r{number} ::= "{number}" root?' for number in range(2000)]
COSTLY = [
    ("json", HOSTILE["an automaton of 60 million states"][1] | {"title": "another"}),
    ("regex", "(" * 40 + "(x+x+)+y" + "){1,9}" * 40),
    ("regex", "((a|b)*a(a|b){15}){99}"),
    ("choice", WORDS),
    ("grammar", "\n".join(["root ::= " + " | ".join(f"r{number}" for number in range(2000)), *RULES])),
]


class Listener:
    """One stream after another, and when their chunks came."""

    def __init__(self, http):
        self._http = http
        self.arrivals = []

    async def listen(self):
        while True:
            async with self._http.stream("POST", "/v1/completions", json=STREAM) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        self.arrivals.append(time.monotonic())

    def gaps(self, start, end):
        """Between chunks, and between the last one of a stream and the first one of the next."""
        inside = [at for at in self.arrivals if start <= at <= end]
        return [after - before for before, after in zip(inside, inside[1:], strict=False)]


def lateness(server):
    """Timers of the API process: how many there were, and how many were late by more than 50 ms."""
    name = "llm_event_loop_lag_seconds"
    total = server.metric(f"{name}_count")
    return total, total - server.metric(f"{name}_bucket", le="0.05")


async def test_slow_grammar_compilations_delay_neither_the_event_loop_nor_other_streams(server):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, headers=HEADERS, timeout=60, limits=limits) as http:
        listener = Listener(http)
        listening = asyncio.create_task(listener.listen())
        while len(listener.arrivals) < NUM_CALM and not listening.done():
            await asyncio.sleep(0.01)
        begun, (timers, late) = time.monotonic(), await asyncio.to_thread(lateness, server)
        took, statuses = [], []
        for kind, form in COSTLY:
            ask = {"model": "tiny", "prompt": "x", "max_tokens": 8, "structured_outputs": {kind: form}}
            asked = time.monotonic()
            statuses.append((await http.post("/v1/completions", json=ask)).status_code)
            took.append(time.monotonic() - asked)
        ended, (timers_then, late_then) = time.monotonic(), await asyncio.to_thread(lateness, server)
        assert not listening.done(), "the stream goes on"
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
    calm, storm = listener.gaps(0, begun), listener.gaps(begun, ended)
    assert statuses[0] == 400 and statuses[-2] == 200 and set(statuses) == {200, 400}
    slowest = max(took)
    assert slowest > 20 * statistics.median(calm), "they were costly, or nothing is proved"
    assert max(storm) < slowest / 4
    assert statistics.median(storm) < 10 * statistics.median(calm)  # 3 on a machine with other work
    assert late_then - late <= 0.1 * (timers_then - timers)
