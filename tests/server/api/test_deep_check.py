"""The completion behind `/health?deep=true`: urgent, bounded in time, and no more often than it may be."""

import contextlib
import math
from types import SimpleNamespace

from quire_server.api import deep_check
from quire_server.api.deep_check import DeepCheck
from quire_server.core.policy import MIN_PRIORITY, TOP_PRIORITY
from quire_server.core.step import TokenEvent
from quire_server.engine.client import DeadlineExceededError, EngineGoneError


class Engine:
    """Says one token at a time, or fails; remembers what it was asked."""

    info = SimpleNamespace(vocab_size=100)

    def __init__(self, failure=None):
        self.failure = failure
        self.asked = []

    @contextlib.asynccontextmanager
    async def submit(self, request, deadline=math.inf):
        self.asked.append((request, deadline - request.arrival))
        yield self

    async def next(self):
        if self.failure is not None:
            raise self.failure
        return TokenEvent("x", (1,))


async def test_it_goes_before_every_client_and_has_a_deadline_of_half_a_minute_to_a_minute():
    engine = Engine()
    outcome = await DeepCheck(engine).outcome()
    [(request, seconds)] = engine.asked
    assert request.priority == TOP_PRIORITY < MIN_PRIORITY
    assert 30 <= seconds <= 60
    assert not outcome.failure


async def test_whoever_asks_within_the_interval_hears_of_the_last_one(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(deep_check, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine = Engine()
    check = DeepCheck(engine)
    for elapsed, completions in [(0, 1), (5, 1), (4.9, 1), (0.2, 2), (0, 2)]:
        now[0] += elapsed
        await check.outcome()
        assert len(engine.asked) == completions


async def test_a_completion_that_fails_or_takes_too_long_is_told_and_not_asked_for_again_at_once():
    for failure, words in [(DeadlineExceededError(""), "within 30 s"), (EngineGoneError("gone"), "gone")]:
        engine = Engine(failure)
        check = DeepCheck(engine)
        assert words in (await check.outcome()).failure
        assert words in (await check.outcome()).failure
        assert len(engine.asked) == 1
