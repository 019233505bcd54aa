"""Sends copies of requests to another LLMDeployment, and drops what it answers.

A client sees nothing of it: a copy is sent beside its request, with the lowest priority, takes no part of
limits or budgets, is never tried twice, wakes no model, and says nothing of whether a replica is well. It
runs on where the client hangs up, so that what is compared are whole answers. Copies are bounded in number,
memory and time: of a request nothing is kept but the bytes that are sent.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from quire_gateway.attempt import Attempt, AttemptError, Upstream, UpstreamRequest
from quire_gateway.dispatch import ShadowTarget
from quire_gateway.metrics import Metrics
from quire_gateway.openai.calls import with_model
from quire_gateway.replica import Replica
from quire_gateway.request_signing import LOWEST_PRIORITY
from quire_gateway.routing.router import RequestFacts
from quire_http.errors import ApiError

SECONDS = 120.0
_MAX_BYTES = 16 << 20  # of memory, all copies together
_EACH_BYTES = 16 << 10  # of a copy besides its body: its task, its connection, and what is read of its answer
_MAX_ANSWER_BYTES = 4 << 20  # of one
_HEADERS = ("accept", "content-type", "x-request-id")


class ShadowTraffic:
    """That of one gateway. ``chance``: below which of 100 a request is copied."""

    def __init__(
        self, upstream: Upstream, metrics: Metrics, chance: random.Random, seconds: float = SECONDS
    ) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._chance = chance
        self._seconds = seconds
        self._in_flight: Counter[str] = Counter()  # by LLMDeployment
        self._num_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def copy(
        self, target: ShadowTarget | None, request: UpstreamRequest, facts: RequestFacts, model: str
    ) -> None:
        """Send a copy, if the request is chosen and there is room. Returns at once. ``model``: that of its
        body.
        """
        if target is None or self._chance.random() * 100 >= target.percent:
            return
        name = target.replicas.audience
        is_full = self._num_bytes + len(request.body) + _EACH_BYTES > _MAX_BYTES
        if is_full or self._in_flight[name] >= target.max_in_flight:
            self._metrics.shadowed(target.replicas.name, "full")
            return
        if (replica := _replica(target, facts)) is None:
            self._metrics.shadowed(target.replicas.name, "no_replica")
            return
        try:
            copy = _copy(target, request, model)
        except ApiError:  # a body that cannot be changed
            self._metrics.shadowed(target.replicas.name, "error")
            return
        size = len(copy.body) + _EACH_BYTES
        self._in_flight[name] += 1
        self._num_bytes += size
        task = asyncio.create_task(self._run(target, replica, copy))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, name, size))

    async def close(self) -> None:
        """End all copies."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None], name: str, size: int) -> None:
        self._tasks.discard(task)
        self._num_bytes -= size
        self._in_flight[name] -= 1
        if not self._in_flight[name]:
            del self._in_flight[name]

    async def _run(self, target: ShadowTarget, replica: Replica, copy: UpstreamRequest) -> None:
        outcome = "cancelled"
        try:
            async with asyncio.timeout(self._seconds):
                outcome = await self._ask(target, replica, copy)
        except TimeoutError:
            outcome = "timeout"
        except AttemptError as error:
            outcome = "timeout" if error.reason in ("timeout", "idle") else "error"
        finally:
            self._metrics.shadowed(target.replicas.name, outcome)

    async def _ask(self, target: ShadowTarget, replica: Replica, copy: UpstreamRequest) -> str:
        """How it ended. Raises AttemptError."""
        timeouts = target.timeouts
        with Attempt(self._upstream, target.replicas, replica, timeouts, is_copy=True) as attempt:
            response = await attempt.ask(copy)
            length = 0
            while data := await attempt.read():
                length += len(data)
                if length > _MAX_ANSWER_BYTES:
                    return "too_long"
            return "success" if response.status < 400 else f"http_{response.status}"


def _replica(target: ShadowTarget, facts: RequestFacts) -> Replica | None:
    """The one that gets the copy; none that is left alone because it fails."""
    model = target.replicas
    others = model.candidates((), target.adapter)
    well = [one for one in others if not model.outliers.is_ejected(one.endpoint.uid)]
    choice = model.router().pick(facts, well, asyncio.get_running_loop().time())
    return None if choice is None else choice.replica


def _copy(target: ShadowTarget, request: UpstreamRequest, model: str) -> UpstreamRequest:
    """What is sent. Raises ApiError."""
    return request._replace(
        headers={name: request.headers[name] for name in _HEADERS if name in request.headers},
        body=with_model(request.body, model, target.served_name),
        identity=request.identity._replace(highest_priority=LOWEST_PRIORITY),
        asked_model="" if target.adapter else request.asked_model,
        is_resumable=False,
    )
