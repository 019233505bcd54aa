"""The engine's only loop: take mail, schedule, run, commit, send. One message per step and direction.

Called by the engine process after loading. Blocks on the socket when there is nothing to do (no CPU time
but a heartbeat a second). A request that cannot be served fails alone, by an event with its error. An
exception out of a step is different: it belongs to no request, and after it neither the scheduler's books
nor the KV cache can be believed. So it ends the process (EngineCrashed) and the pod starts afresh, rather
than risk somebody's wrong answer.
"""

from __future__ import annotations

import logging
import math
import time

from quire_server.core.engine_stats import EngineStats
from quire_server.core.errors import RequestError
from quire_server.core.policy import MAX_PRIORITY, MIN_PRIORITY, TOP_PRIORITY
from quire_server.core.request import FinishReason, Request
from quire_server.core.scheduler import Scheduler
from quire_server.core.step import StepEvents, TokenEvent, failure
from quire_server.engine.canary import Canary
from quire_server.engine.grammar_room import LOOK_SECONDS, GrammarRoom
from quire_server.engine.inbox import EngineSocket, Mail, Peer
from quire_server.engine.messages import EngineInfo, Outbox
from quire_server.engine.pipeline import Pipeline
from quire_server.engine.pulse import Pulse
from quire_server.faults import Faults
from quire_server.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_AUDIT_SECONDS = 10.0
_FLAP_SECONDS = 10.0


class Engine:
    """Scheduler and runner of one model, with the proof that they work."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        info: EngineInfo,
        pulse: Pulse,
        faults: Faults,
        canary_interval: float,
    ) -> None:
        self._scheduler = scheduler
        self._pipeline = Pipeline(scheduler, runner)
        self._grammar_room = GrammarRoom(runner.grammars)
        self._info = info
        self._pulse = pulse
        self._faults = faults
        self._canary_interval = canary_interval
        self._canary = Canary.for_model(info.vocab_size, info.max_model_len)
        self._canary_runs = 0
        self._expected: tuple[int, ...] = ()
        self._owners: dict[str, Peer] = {}
        self._steps = 0
        self._batch_size = 0
        self._step_tokens = 0
        self._audited_at = 0.0
        self._unaccounted = 0

    def warm_up(self) -> None:
        """The first completion: what it answers is what every later canary has to answer."""
        self._pulse.warming()
        self._expected = self._run_canary()

    def serve(self, socket: EngineSocket) -> None:
        """Run until the process is ended. Ready once the API process, which listens before it connects,
        is there.
        """
        while not socket.peers:
            socket.poll(_TICK_SECONDS)
        self._pulse.serving()
        while True:
            busy = self._scheduler.has_work
            patience = LOOK_SECONDS if self._grammar_room else _TICK_SECONDS
            mail = socket.poll(0.0 if busy else patience)
            self._take(mail, socket)
            if self._grammar_room:
                self._take_ready(socket)
            self._audit()
            if self._scheduler.has_work:
                self._work(socket)
            else:
                self._rest(socket)

    def _take(self, mail: Mail, socket: EngineSocket) -> None:
        if mail.reset_cache:
            self._scheduler.kv.reset()
        refused: list[tuple[Peer, TokenEvent]] = []
        for peer, request in mail.requests:
            try:
                self._check(request)
                if (grammar := request.sampling.grammar) is None:
                    self._scheduler.add(request)
                else:
                    self._grammar_room.enter(request, grammar)
            except RequestError as error:
                event = TokenEvent(request.request_id, (), finish_reason=FinishReason.ERROR, error=str(error))
                refused.append((peer, event))
                continue
            peer.requests.add(request.request_id)
            self._owners[request.request_id] = peer
        # After the requests: what is submitted and given up within one message must not stay.
        for request_id in mail.aborts:
            self._forget(request_id)
            self._scheduler.abort(request_id)
        for request_id in mail.ended:
            self._forget(request_id)
            self._scheduler.end(request_id)
        for peer, event in refused:
            socket.send(peer, Outbox((event,), self._stats()))

    def _take_ready(self, socket: EngineSocket) -> None:
        """Requests whose grammar can be followed now."""
        for request, why in self._grammar_room.ready():
            if not why:
                self._scheduler.add(request)
            elif (owner := self._owners.get(request.request_id)) is not None:
                self._forget(request.request_id)
                socket.send(owner, Outbox((failure(request.request_id, why),), self._stats()))

    def _check(self, request: Request) -> None:
        """What the API process has checked already; the engine believes nobody."""
        if request.request_id in self._owners:
            raise RequestError("the request id is taken")
        if not (MIN_PRIORITY <= request.priority <= MAX_PRIORITY or request.priority == TOP_PRIORITY):
            raise RequestError("there is no such priority", param="priority")
        if not math.isfinite(request.arrival):
            raise RequestError("the time of arrival is no number")
        prompt = request.prompt_token_ids
        if not prompt or min(prompt) < 0 or max(prompt) >= self._info.vocab_size:
            raise RequestError("a token id is outside of the vocabulary", param="prompt")
        named = request.sampling.named_token_ids
        if named and (min(named) < 0 or max(named) >= self._info.vocab_size):
            raise RequestError("a token id of the sampling parameters is outside of the vocabulary")
        if request.sampling.grammar is not None and request.sampling.ignore_eos:
            raise RequestError("a grammar needs the token that ends a text", param="ignore_eos")

    def _work(self, socket: EngineSocket) -> None:
        scheduler = self._scheduler
        self._pulse.working(self._queued, scheduler.num_running, scheduler.kv_utilization)
        outgoing = {peer: StepEvents([], [], []) for peer in socket.peers}
        told = self._step()
        for request_id, token_id in zip(told.request_ids, told.token_ids, strict=True):
            owner = self._owners.get(request_id)
            if owner in outgoing:
                outgoing[owner].request_ids.append(request_id)
                outgoing[owner].token_ids.append(token_id)
        for event in told.others:
            owner = self._owners.get(event.request_id)
            if owner in outgoing:
                outgoing[owner].others.append(event)
            if event.finish_reason is not None:
                self._forget(event.request_id)
        stats = self._stats()
        for peer, mine in outgoing.items():
            tokens = tuple(mine.request_ids), tuple(mine.token_ids)
            socket.send(peer, Outbox(tuple(mine.others), stats, *tokens))

    def _audit(self) -> None:
        """Every now and then, see whether each KV block is somebody's. A wrong count is no reason to end: it
        costs capacity, and the gauge and one line in the log say so.
        """
        now = time.monotonic()
        if now - self._audited_at < _AUDIT_SECONDS:
            return
        unaccounted, self._audited_at = self._scheduler.num_unaccounted_blocks, now
        if unaccounted and unaccounted != self._unaccounted:
            logger.error("KV blocks are unaccounted for", extra={"blocks": unaccounted})
        self._unaccounted = unaccounted

    def _step(self) -> StepEvents:
        scheduler = self._scheduler
        if self._faults.due("crash_step", self._steps):
            raise RuntimeError("the fault crash_step")
        if self._faults.due("stuck_step", self._steps):
            while True:
                time.sleep(60)
        advanced = self._pipeline.advance()
        if advanced is None:
            # Work that cannot be scheduled now, such as what waits for memory: a stall if it lasts.
            time.sleep(0.001)
            return StepEvents([], [], [])
        step, events = advanced
        self._steps += 1
        self._batch_size = len(step.rows)
        self._step_tokens = step.total_tokens
        self._pulse.stepped(scheduler.has_work, self._queued, scheduler.num_running, scheduler.kv_utilization)
        return events

    def _rest(self, socket: EngineSocket) -> None:
        """Nothing to do: show life, and prove it when it is time."""
        now = time.monotonic()
        self._batch_size = self._step_tokens = 0
        self._pulse.idle(self._queued, self._scheduler.kv_utilization)
        if now - self._pulse.sample.proof_at >= self._canary_interval and not self._pulse.sample.reason:
            self._prove()
        flapping = self._faults.get("flapping_readiness")
        if flapping is not None:
            bad = int(now / (flapping.after or _FLAP_SECONDS)) % 2 == 1
            self._pulse.distrust("FlappingReadiness" if bad else "")
        stats = self._stats()
        for peer in socket.peers:
            socket.send(peer, Outbox((), stats))

    def _prove(self) -> None:
        """Run the canary again. A wrong one is for good: only a restart makes an engine believable again."""
        tokens = self._run_canary()
        if self._faults.due("wrong_canary", self._canary_runs - 2):
            tokens = tokens[:-1] + ((tokens[-1] + 1) % self._info.vocab_size,)
        if tokens != self._expected:
            logger.error("the canary's tokens changed", extra={"expected": self._expected, "tokens": tokens})
            self._pulse.distrust("CanaryMismatch")

    def _run_canary(self) -> tuple[int, ...]:
        """The canary's tokens, computed with nothing else in the batch."""
        self._canary_runs += 1
        request = self._canary.request(self._canary_runs, time.monotonic())
        self._scheduler.add(request)
        self._pulse.working(self._queued, 1, self._scheduler.kv_utilization)
        tokens: list[int] = []
        while True:
            for event in self._step():
                tokens += event.token_ids
                if event.error is not None:
                    raise RuntimeError(f"the canary failed: {event.error}")
                if event.finish_reason is not None:
                    return tuple(tokens)

    def _forget(self, request_id: str) -> None:
        self._grammar_room.leave(request_id)
        peer = self._owners.pop(request_id, None)
        if peer is not None:
            peer.requests.discard(request_id)

    @property
    def _queued(self) -> int:
        forced = self._faults.get("queue_depth")
        return self._scheduler.num_waiting if forced is None else int(forced.after)

    def _stats(self) -> EngineStats:
        counters = self._scheduler.stats
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._queued,
            kv_utilization=self._scheduler.kv_utilization,
            batch_size=self._batch_size,
            preemptions=counters.preemptions,
            kv=self._scheduler.kv.stats(),
            blocks_unaccounted=self._unaccounted,
            speculation=counters.speculation,
            step_tokens=self._step_tokens,
            deferred=len(self._grammar_room),
        )
