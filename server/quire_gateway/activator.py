"""Holds requests for a model whose pods have stopped, has one started, and lets them go on as there is room.

The name is Knative's. A stream gets comments while it waits, so that neither its client nor a proxy between
gives up; other requests get nothing. All of them are released at the pace at which replicas take them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from quire_gateway import demand
from quire_gateway.attempt import AttemptError
from quire_gateway.hold_queue import HeldRequest, HoldQueue
from quire_gateway.llm_route import Hold
from quire_gateway.metrics import Metrics
from quire_gateway.replicas import Model, ReplicaTable
from quire_gateway.routing_state import ObjectStore
from quire_gateway.routing_table import Place
from quire_http.exchange import HttpExchange

HOLD_TIMEOUT, HOLD_FULL = "hold_timeout", "hold_queue_full"
ADAPTER_NOT_READY = "adapter_not_ready"
_RELEASE_SECONDS = 0.05  # between two looks for room
_RAMP_SECONDS = 30.0  # after which requests go to replicas as they come
_LOOK_SECONDS = 1.0  # between two looks whether a request may still wait
_MAX_HELD_BYTES = 16 << 20  # of bodies, of all models
_FIRST_COMMENT_SECONDS, _COMMENT_SECONDS = 5.0, 15.0
_UNKNOWN_LOAD_SECONDS = 30
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class HoldError(AttemptError):
    """A request was not held, or not for long enough. ``retry_after``: seconds."""

    def __init__(self, reason: str, message: str, retry_after: int) -> None:
        super().__init__(reason, message)
        self.retry_after = retry_after


class Held(NamedTuple):
    """Who waits, and until when at most. ``is_open``: raises where the request is not to wait any more."""

    client: str
    stream: bool
    num_bytes: int
    limits: Hold
    until: float
    is_open: Callable[[], object]


class Activator:
    """That of one gateway. ``can_ask``: whether it can ask the operator for a pod."""

    def __init__(
        self,
        replicas: ReplicaTable,
        deployments: ObjectStore,
        metrics: Metrics,
        num_gateways: Callable[[], int],
        *,
        can_ask: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._deployments = deployments
        self._metrics = metrics
        self._num_gateways = num_gateways
        self._can_ask = can_ask
        self._clock = clock
        self._queues: dict[Place, HoldQueue] = {}
        self._releasing: dict[Place, asyncio.Task[None]] = {}
        self._demanded_at: dict[Place, float] = {}
        self._held_bytes = 0
        self.demanded = asyncio.Event()  # set when a model is asked for that was not before

    def is_asleep(self, model: Model, adapter: str = "") -> bool:
        """Whether a request has to wait: no replica is there, none has loaded its adapter yet, or others wait
        already.
        """
        if not self._may_sleep(model):
            return False
        return not model.replicas or model.is_loading(adapter) or model.place in self._queues

    def is_leaving(self, model: Model, failure: AttemptError | None, adapter: str = "") -> bool:
        """Whether a request that no replica took may be taken by one that starts, or loads its adapter."""
        if not self._may_sleep(model):
            return False
        if failure is not None and failure.reason == ADAPTER_NOT_READY:
            return model.is_loading(adapter)
        return failure is None or failure.reason == "draining"

    def demands(self) -> list[Place]:
        """The models that are asked for now."""
        now = self._clock()
        waiting = dict.fromkeys(self._queues, now)
        self._demanded_at = {
            place: at
            for place, at in (self._demanded_at | waiting).items()
            if now - at < demand.RENEW_SECONDS
        }
        return list(self._demanded_at)

    async def wait(
        self,
        exchange: HttpExchange,
        model: Model,
        held: Held,
        avoided: Collection[str] = (),
        adapter: str = "",
    ) -> Model:
        """Returns the model when it is the request's turn. Raises HoldError, and what `held.is_open` and
        `exchange` raise. ``avoided``: the replicas that have refused the request because they end.
        """
        self._demand(model.place)
        self._refuse_beyond_limits(model, held)
        turn = asyncio.Event()
        one = HeldRequest(held.client, turn.set, partial(self._can_go, model, avoided, adapter))
        queue = self._queues.setdefault(model.place, HoldQueue())
        queue.add(one)
        if model.place not in self._releasing:
            self._releasing[model.place] = asyncio.create_task(self._release(model.place))
        begun, outcome = self._clock(), "gone"
        self._metrics.held(model.name, 1)
        self._held_bytes += held.num_bytes
        exchange.shrink_body(held.num_bytes)
        try:
            await self._wait(exchange, model, held, turn)
            held.is_open()
            outcome = "released"
            return self._replicas.at(model.place) or model
        except HoldError:
            outcome = "timeout"
            raise
        finally:
            queue.discard(one)
            self._held_bytes -= held.num_bytes
            self._metrics.held(model.name, -1)
            self._metrics.hold_ended(model.name, outcome, self._clock() - begun)

    def _can_go(
        self, model: Model, avoided: Collection[str], adapter: str, replicas: Collection[str]
    ) -> bool:
        """Whether one of the replicas is not avoided, and no adapter has to be waited for."""
        now = self._replicas.at(model.place) or model
        return any(uid not in avoided for uid in replicas) and not now.is_loading(adapter)

    def _refuse_beyond_limits(self, model: Model, held: Held) -> None:
        if held.until <= self._clock():
            raise self._refused(model, HOLD_TIMEOUT)
        num_waiting = len(self._queues.get(model.place, ()))
        if num_waiting >= held.limits.max_requests or self._held_bytes + held.num_bytes > _MAX_HELD_BYTES:
            raise self._refused(model, HOLD_FULL)

    async def _wait(self, exchange: HttpExchange, model: Model, held: Held, turn: asyncio.Event) -> None:
        """Return when it is the request's turn; look now and then whether one can still come."""
        comment_at = self._clock() + _FIRST_COMMENT_SECONDS
        while (left := held.until - self._clock()) > 0:
            try:
                async with asyncio.timeout(min(left, _LOOK_SECONDS)):
                    await turn.wait()
                    return
            except TimeoutError:
                pass
            held.is_open()
            if not self._may_sleep(model):
                break
            if held.stream and self._clock() >= comment_at:
                await self._comment(exchange, model)
                comment_at = self._clock() + _COMMENT_SECONDS
        raise self._refused(model, HOLD_TIMEOUT)

    async def _comment(self, exchange: HttpExchange, model: Model) -> None:
        if not exchange.started:
            await exchange.begin(200, _EVENTS, is_events=True)
        seconds = self._seconds_until_loaded(model)
        about = "" if seconds is None else f", about {seconds} s left"
        await exchange.comment(f"waiting: the model is started{about}".encode())

    def _refused(self, model: Model, reason: str) -> HoldError:
        seconds = self._seconds_until_loaded(model) or _UNKNOWN_LOAD_SECONDS
        message = "The model is started and does not answer yet."
        if reason == HOLD_FULL:
            message = "The model is started; too many requests wait for it already."
        elif not self._may_sleep(model):
            message = "No pod is started for the requests of this model any more."
        return HoldError(reason, message, seconds)

    def _seconds_until_loaded(self, model: Model) -> int | None:
        return demand.seconds_until_loaded(self._deployments.get(model.place), time.time())

    def _may_sleep(self, model: Model) -> bool:
        return self._can_ask and demand.scales_to_zero(self._deployments.get(model.place))

    def _demand(self, place: Place) -> None:
        if place not in self._demanded_at:
            self.demanded.set()
        self._demanded_at[place] = self._clock()

    async def _release(self, place: Place) -> None:
        """Let requests go on until none waits: each gateway takes its share of the replicas' room, until they
        have run for a while. From then on what they have no room for waits at the replicas, where it counts
        for autoscaling.
        """
        try:
            queue, ready_at = self._queues[place], None
            while queue:
                await asyncio.sleep(_RELEASE_SECONDS)
                model = self._replicas.at(place)
                if model is None or not model.replicas:
                    ready_at = None
                    continue
                ready_at = self._clock() if ready_at is None else ready_at
                if self._clock() - ready_at >= _RAMP_SECONDS:
                    queue.release(len(queue), model.replicas)
                    continue
                room = demand.slots(self._deployments.get(place)) * len(model.replicas)
                mine = -(-room // max(1, self._num_gateways()))
                in_flight = sum(one.in_flight for one in model.replicas.values())
                queue.release(mine - in_flight, model.replicas)
        finally:
            del self._queues[place], self._releasing[place]
