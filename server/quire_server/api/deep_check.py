"""A real completion on demand, for `/health?deep=true`: through scheduler and model, at the highest priority.

It bypasses admission, so that it reports the truth about an overloaded server. It must not load the server
either, so one runs at a time and at most one in some seconds; requests in between get the last outcome.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass

from quire_server.core.policy import TOP_PRIORITY
from quire_server.core.request import PoolingParams, Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.engine.client import DeadlineExceededError, EngineClient, EngineGoneError, RequestLostError

NUM_TOKENS = 4
TIMEOUT_SECONDS = 30.0
INTERVAL_SECONDS = 10.0


@dataclass(frozen=True)
class Outcome:
    """How it went, and when."""

    ended_at: float
    seconds: float
    failure: str = ""


class DeepCheck:
    """The deep check of one API process."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._turn = asyncio.Lock()
        self._last: Outcome | None = None

    async def outcome(self) -> Outcome:
        """Of a completion that is at most INTERVAL_SECONDS old."""
        async with self._turn:
            if self._last is None or time.monotonic() - self._last.ended_at >= INTERVAL_SECONDS:
                self._last = await self._complete()
            return self._last

    async def _complete(self) -> Outcome:
        begun_at = time.monotonic()
        failure = ""
        try:
            await self._ask(begun_at)
        except DeadlineExceededError:
            failure = f"no completion within {TIMEOUT_SECONDS:g} s"
        except (EngineGoneError, RequestLostError) as error:
            failure = str(error)
        ended_at = time.monotonic()
        return Outcome(ended_at, ended_at - begun_at, failure)

    async def _ask(self, begun_at: float) -> None:
        pools = bool(self._engine.info.pooling)
        wanted = 1 if pools else NUM_TOKENS
        request = Request(
            f"health-{uuid.uuid4().hex}",
            (self._engine.info.vocab_size // 2,),
            SamplingParams(max_tokens=wanted, temperature=0.0, ignore_eos=True),
            arrival=begun_at,
            priority=TOP_PRIORITY,
            pooling=PoolingParams() if pools else None,
        )
        num_tokens = 0
        async with self._engine.submit(request, begun_at + TIMEOUT_SECONDS) as events:
            while num_tokens < wanted:
                num_tokens += len((await events.next()).token_ids)
