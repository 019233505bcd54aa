"""The completion behind `/health?deep=true`: top priority, a deadline, and at most one per interval."""

import contextlib
import math
from types import SimpleNamespace

from quire_server.api import deep_check
from quire_server.api.deep_check import DeepCheck
from quire_server.core.policy import MIN_PRIORITY, TOP_PRIORITY
from quire_server.core.step import TokenEvent
from quire_server.engine.client import DeadlineExceededError, EngineGoneError


class Engine:
    """Returns one token at a time, or fails; records its requests."""

    info = SimpleNamespace(vocab_size=100, pooling="")

    def __init__(self, failure=None):
        self.failure = failure
        self.submitted = []

    @contextlib.asynccontextmanager
    async def submit(self, request, deadline=math.inf):
        self.submitted.append((request, deadline - request.arrival))
        yield self

    async def next(self):
        if self.failure is not None:
            raise self.failure
        return TokenEvent("x", (1,))


async def test_its_request_has_top_priority_and_a_deadline_of_30_to_60_seconds():
    engine = Engine()
    outcome = await DeepCheck(engine).outcome()
    [(request, seconds)] = engine.submitted
    assert request.priority == TOP_PRIORITY < MIN_PRIORITY
    assert 30 <= round(seconds, 6) <= 60, "but for the rounding of a clock's difference"
    assert not outcome.failure


async def test_within_the_interval_the_last_outcome_is_returned_again(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(deep_check, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine = Engine()
    check = DeepCheck(engine)
    for elapsed, completions in [(0, 1), (5, 1), (4.9, 1), (0.2, 2), (0, 2)]:
        now[0] += elapsed
        await check.outcome()
        assert len(engine.submitted) == completions


async def test_a_failed_or_late_completion_is_reported_and_not_repeated_at_once():
    for failure, words in [(DeadlineExceededError(""), "within 30 s"), (EngineGoneError("gone"), "gone")]:
        engine = Engine(failure)
        check = DeepCheck(engine)
        assert words in (await check.outcome()).failure
        assert words in (await check.outcome()).failure
        assert len(engine.submitted) == 1
