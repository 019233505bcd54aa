"""The engine's main loop: read inputs, schedule, run a step, commit, send outputs.

One message per step and direction. While there is nothing to do the loop blocks on the socket and wakes up
once a second for a heartbeat. A request that cannot be served fails alone, by an event with its error. An
exception from a step is different: it belongs to no request, and afterwards neither the scheduler's state nor
the KV cache can be trusted. It ends the process (EngineCrashed) and the pod restarts, rather than risk a
wrong answer.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

from quire_server.core.policy import MAX_PRIORITY, MIN_PRIORITY, TOP_PRIORITY
from quire_server.core.request import FinishReason, Request
from quire_server.core.scheduler import Scheduler
from quire_server.core.stats import AdapterStats, EngineStats
from quire_server.core.step import (
    ENGINE_FAILURES,
    NOT_FINITE,
    Step,
    StepEvents,
    StepResult,
    TokenEvent,
    failure_event,
)
from quire_server.engine.adapter_registry import AdapterRegistry, AdapterStore
from quire_server.engine.canary import Canary, CanaryRun
from quire_server.engine.golden_tokens import Golden, GoldenTokens
from quire_server.engine.grammar_queue import POLL_SECONDS, GrammarQueue
from quire_server.engine.heartbeat_writer import HeartbeatWriter
from quire_server.engine.kv_connector import KVConnector
from quire_server.engine.messages import AdapterState, AdapterStates, EngineInfo, EngineOutputs
from quire_server.engine.proof import MAX_WRONG, Outcome, ProofOfInference
from quire_server.engine.socket_server import EngineSocket, Peer, PolledInputs
from quire_server.errors import CanaryMismatchError, RequestError
from quire_server.fault_injection import Faults
from quire_server.runner.structured_outputs import Grammars

logger = logging.getLogger(__name__)

_IDLE_POLL_SECONDS = 1.0
_EXCHANGE_SECONDS = 0.02  # between messages to ranks that read adapters, while no step runs
_BLOCK_CHECK_SECONDS = 10.0
_FLAP_SECONDS = 10.0
_RETRY_SECONDS = 0.001
_MAX_LOGGED = 256  # requests in one line of the log
_MISMATCH = "CanaryMismatch"  # the reason for which the engine is unready

LaunchedStep = tuple[Step, Callable[[], StepResult]]


class StepExecutor(Protocol):
    """What executes steps: the model runner. ``launch`` returns a function that waits for the result. Results
    are read in the order of the launches, and at most ``max_steps_in_flight`` have been launched and not
    been read: more than one where ``launch`` returns before the result exists.
    """

    @property
    def max_steps_in_flight(self) -> int: ...

    def launch(self, step: Step) -> Callable[[], StepResult]: ...


class Runner(StepExecutor, Protocol):
    """A loaded model."""

    @property
    def grammars(self) -> Grammars: ...

    @property
    def adapters(self) -> AdapterStore | None: ...

    def damage_weight(self) -> None: ...


class StepPipeline:
    """Takes steps from the scheduler to the executor and results back.

    With an asynchronous executor steps overlap: the next one is scheduled and launched while a device
    computes the one before, or while the further stages of a pipeline do. Whether a step can be scheduled
    ahead of a result is the scheduler's decision.
    """

    def __init__(self, scheduler: Scheduler, executor: StepExecutor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._launched: deque[LaunchedStep] = deque()  # not committed yet

    def advance(self) -> tuple[Step, StepEvents] | None:
        """Commit the oldest step, once no further one can be launched. None: there is work, but it cannot be
        scheduled now.
        """
        while len(self._launched) < self._executor.max_steps_in_flight:
            step = self._scheduler.schedule()
            if step is None:
                break
            self._launched.append((step, self._executor.launch(step)))
        if not self._launched:
            return None
        step, wait = self._launched.popleft()
        return step, self._scheduler.commit(step, wait())


class EngineCore:
    """Scheduler and model runner of one model, and the canary that checks them."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        info: EngineInfo,
        heartbeat: HeartbeatWriter,
        faults: Faults,
        proof: ProofOfInference,
        golden: GoldenTokens,
        connector: KVConnector | None = None,
        report_adapters: Callable[
            [Sequence[AdapterState], Sequence[str]], object
        ] = lambda states, unloaded: None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._pipeline = StepPipeline(scheduler, runner)
        self._grammar_queue = GrammarQueue(runner.grammars)
        self._connector = connector or KVConnector()
        self._adapters = AdapterRegistry(runner.adapters, scheduler.adapters)
        self._report_adapters = report_adapters
        self._info = info
        self._heartbeat = heartbeat
        self._faults = faults
        self._proof = proof
        self._golden = golden
        self._canary = Canary.for_model(info.vocab_size, info.max_model_len, pools=bool(info.pooling))
        self._canary_runs = 0
        self._canary_run: CanaryRun | None = None  # in progress
        self.canary_tokens: tuple[int, ...] = ()  # of the first run
        self._peers: dict[str, Peer] = {}  # by request id
        self._external_ids: dict[str, str] = {}  # of the same requests
        self._num_steps = 0
        self._batch_size = 0
        self._step_tokens = 0
        self._blocks_checked_at = 0.0
        self._unaccounted_blocks = 0
        self._adapter_counts = 0, 0  # loaded, and failed

    def warm_up(self) -> None:
        """Run the canary for the first time: its tokens are the reference for all later runs, unless there
        are golden ones. Raises CanaryMismatchError where these are others.
        """
        self._heartbeat.warming()
        self._start_canary()
        self._heartbeat.working(self._queue_depth, 1, self._scheduler.kv_utilization)
        while self._canary_run is not None:
            self._advance()

    def serve(self, socket: EngineSocket) -> None:
        """Run until the process is ended. The engine is ready when the API process has connected, which
        listens for clients before it connects.
        """
        while not socket.peers:
            socket.poll(_IDLE_POLL_SECONDS)
        self._heartbeat.serving()
        self._connector.start(socket.wake)
        self._adapters.wake = socket.wake
        try:
            while True:
                self._iterate(socket)
        except Exception:
            if self._peers:
                lost = [self._log_facts(request_id) for request_id in islice(self._peers, _MAX_LOGGED)]
                facts = {"open": len(self._peers), "lost": lost}
                logger.error("the engine ends with open requests", extra=facts)
            raise

    def _iterate(self, socket: EngineSocket) -> None:
        timeout = _EXCHANGE_SECONDS if self._adapters.is_exchanging else _IDLE_POLL_SECONDS
        timeout = POLL_SECONDS if self._grammar_queue else timeout
        inputs = socket.poll(0.0 if self._scheduler.has_work else timeout)
        has_changed = self._adapters.apply(inputs.adapter_loads, inputs.adapter_drops)
        if self._adapters.advance() or has_changed:
            self._announce_adapters(socket)
        self._process_inputs(inputs, socket)
        if self._grammar_queue:
            self._add_compiled_requests(socket)
        for request, num_fetched_tokens in self._connector.advance():
            self._scheduler.add(request, num_fetched_tokens=num_fetched_tokens)
        self._heartbeat.set_transfer_degraded(self._connector.is_degraded)
        self._check_blocks()
        if self._canary_run is None and self._proof.is_due(time.monotonic()):
            self._start_canary()
        if self._scheduler.has_work:
            self._run_step(socket)
        else:
            self._idle(socket)

    # ---------------------------------------------------------------- inputs

    def _process_inputs(self, inputs: PolledInputs, socket: EngineSocket) -> None:
        if inputs.reset_cache:
            self._scheduler.kv.reset()
        rejected: list[tuple[Peer, TokenEvent]] = []
        for peer, request in inputs.requests:
            peer.num_received += 1
            try:
                self._validate(request)
                if (grammar := request.sampling.grammar) is None:
                    self._add(request)
                else:
                    self._grammar_queue.add(request, grammar)
            except RequestError as error:
                rejected.append((peer, failure_event(request.request_id, str(error))))
                _log_failure(_log_facts(request.request_id, request.external_id), str(error))
                continue
            peer.requests.add(request.request_id)
            self._peers[request.request_id] = peer
            self._external_ids[request.request_id] = request.external_id
            logger.debug("request received", extra=self._log_facts(request.request_id))
        # After the requests, because a request may be added and aborted in one message.
        for request_id in inputs.aborts:
            if request_id in self._peers:
                logger.debug("request aborted", extra=self._log_facts(request_id))
            self._forget(request_id)
            self._scheduler.abort(request_id)
        for request_id in inputs.finished:
            if request_id in self._peers:
                self._proof.answered(time.monotonic())
                facts = {**self._log_facts(request_id), "finish_reason": FinishReason.STOP.value}
                logger.debug("request ended", extra=facts)
            self._forget(request_id)
            self._scheduler.finish(request_id)
        for peer, event in rejected:
            self._send(socket, peer, self._stats(), (event,))

    def _add_compiled_requests(self, socket: EngineSocket) -> None:
        """Schedule requests whose grammar is compiled now; those whose grammar failed get an error."""
        for request, error in self._grammar_queue.pop_ready():
            error = error or self._adapters.missing(request.adapter)  # dropped while it waited
            if not error:
                self._add(request)
            elif (peer := self._peers.get(request.request_id)) is not None:
                _log_failure(self._log_facts(request.request_id), error)
                self._forget(request.request_id)
                self._send(socket, peer, self._stats(), (failure_event(request.request_id, error),))

    def _add(self, request: Request) -> None:
        """Schedule a request, once its prefix is there if that is fetched from another server. Raises
        RequestError where its adapter is not loaded.
        """
        if (adapter := self._adapters.find(request.adapter)) is not None:
            self._scheduler.add(request, adapter=adapter.number, adapter_key=adapter.key)
        elif not self._connector.add(request):
            self._scheduler.add(request)

    def _announce_adapters(self, socket: EngineSocket) -> None:
        states = self._adapters.states()
        self._adapter_counts = (
            sum(state.is_ready for state in states),
            sum(bool(state.reason) for state in states),
        )
        self._report_adapters(states, self._adapters.unloaded)
        socket.announce(AdapterStates(states))

    def _validate(self, request: Request) -> None:
        """Check again what the API process has checked already: the engine does not trust its peers."""
        if request.request_id in self._peers:
            raise RequestError("the request id is taken")
        if not (MIN_PRIORITY <= request.priority <= MAX_PRIORITY or request.priority == TOP_PRIORITY):
            raise RequestError("there is no such priority", param="priority")
        if not math.isfinite(request.arrival):
            raise RequestError("the time of arrival is no number")
        prompt = request.prompt_token_ids
        if not prompt or min(prompt) < 0 or max(prompt) >= self._info.vocab_size:
            raise RequestError("a token id is outside of the vocabulary", param="prompt")
        given = request.output_token_ids
        if given and (min(given) < 0 or max(given) >= self._info.vocab_size):
            raise RequestError("a token id is outside of the vocabulary", param="resume.token_ids")
        named = request.sampling.named_token_ids
        if named and (min(named) < 0 or max(named) >= self._info.vocab_size):
            raise RequestError("a token id of the sampling parameters is outside of the vocabulary")
        if request.sampling.grammar is not None and request.sampling.ignore_eos:
            raise RequestError("a grammar needs the token that ends a text", param="ignore_eos")
        if (request.pooling is not None) != bool(self._info.pooling):
            raise RequestError("this engine does one of two tasks, generation or pooling, and not the other")

    def _forget(self, request_id: str) -> None:
        self._grammar_queue.remove(request_id)
        self._connector.remove(request_id)
        peer = self._peers.pop(request_id, None)
        if peer is not None:
            peer.requests.discard(request_id)
            del self._external_ids[request_id]

    def _log_facts(self, request_id: str) -> dict[str, str]:
        return _log_facts(request_id, self._external_ids.get(request_id, ""))

    # ---------------------------------------------------------------- steps

    def _run_step(self, socket: EngineSocket) -> None:
        """Advance by one step, and send each peer the tokens and events of its requests."""
        scheduler = self._scheduler
        if self._peers:  # by request: not the canary
            self._heartbeat.requested()
        self._heartbeat.working(self._queue_depth, scheduler.num_running, scheduler.kv_utilization)
        outgoing = {peer: StepEvents([], [], []) for peer in socket.peers}
        result = self._advance()
        for request_id, token_id in zip(result.request_ids, result.token_ids, strict=True):
            peer = self._peers.get(request_id)
            if peer in outgoing:
                outgoing[peer].request_ids.append(request_id)
                outgoing[peer].token_ids.append(token_id)
        for event in result.events:
            peer = self._peers.get(event.request_id)
            if peer in outgoing:
                outgoing[peer].events.append(event)
            if event.finish_reason is not None:
                self._forget(event.request_id)
        stats = self._stats()
        for peer, batch in outgoing.items():
            columns = tuple(batch.request_ids), tuple(batch.token_ids)
            self._send(socket, peer, stats, tuple(batch.events), *columns)

    def _advance(self) -> StepEvents:
        scheduler = self._scheduler
        if self._faults.due("crash_step", self._num_steps):
            raise RuntimeError("the fault crash_step")
        if self._faults.due("stuck_step", self._num_steps):
            while True:
                time.sleep(60)
        if self._faults.due("nan_weight", self._num_steps):
            self._runner.damage_weight()
        advanced = self._pipeline.advance()
        if advanced is None:
            # Nothing can be scheduled now, for example for lack of memory. If that lasts, it counts as a
            # stall.
            time.sleep(_RETRY_SECONDS)
            return StepEvents([], [], [])
        step, events = advanced
        if not step.rows and scheduler.kv.has_transfers:
            # All that could run waits for blocks that another server reads or writes, for a whole lease if
            # that one is frozen. ``advance`` of the connector finds out that there is room again.
            time.sleep(_RETRY_SECONDS)  # no event says when
        self._connector.take(events)
        self._num_steps += 1
        self._batch_size = len(step.rows)
        self._step_tokens = step.total_tokens
        self._heartbeat.stepped(
            scheduler.has_work, self._queue_depth, scheduler.num_running, scheduler.kv_utilization
        )
        self._take_proofs(events)
        return events

    def _take_proofs(self, events: StepEvents) -> None:
        """What a step shows of the engine's health: answers, failures, and tokens of the canary."""
        if (run := self._canary_run) is not None:
            run.take(events)
            if run.is_complete:
                self._canary_run = None
                self._judge_canary(run)
        now = time.monotonic()
        for event in events.events:
            if event.request_id not in self._peers or event.finish_reason is None:
                continue
            facts = self._log_facts(event.request_id)
            if event.error is not None:
                self._proof.failed(event.error)
                _log_failure(facts, event.error)
            else:
                self._proof.answered(now)
                logger.debug("request ended", extra={**facts, "finish_reason": event.finish_reason.value})
        self._heartbeat.proved(self._proof.at)

    def _check_blocks(self) -> None:
        """Look for leaked KV blocks now and then. A leak costs capacity but no correctness, so it is reported
        by a gauge and one log line, and the engine continues.
        """
        now = time.monotonic()
        if now - self._blocks_checked_at < _BLOCK_CHECK_SECONDS:
            return
        unaccounted, self._blocks_checked_at = self._scheduler.num_unaccounted_blocks, now
        if unaccounted and unaccounted != self._unaccounted_blocks:
            logger.error("KV blocks are unaccounted for", extra={"blocks": unaccounted})
        self._unaccounted_blocks = unaccounted

    # ---------------------------------------------------------------- idle, canary

    def _idle(self, socket: EngineSocket) -> None:
        """Release expired pins, write a heartbeat, and send current stats."""
        now = time.monotonic()
        self._scheduler.kv.expire_pins()
        self._batch_size = self._step_tokens = 0
        self._heartbeat.idle(self._queue_depth, self._scheduler.kv_utilization)
        flapping = self._faults.get("flapping_readiness")
        if flapping is not None:
            is_bad = int(now / (flapping.after or _FLAP_SECONDS)) % 2 == 1
            self._heartbeat.set_unready_reason("FlappingReadiness" if is_bad else "")
            if is_bad:
                self._faults.mark_injected("flapping_readiness")
        stats = self._stats()
        for peer in socket.peers:
            self._send(socket, peer, stats)

    @staticmethod
    def _send(
        socket: EngineSocket,
        peer: Peer,
        stats: EngineStats,
        events: tuple[TokenEvent, ...] = (),
        request_ids: tuple[str, ...] = (),
        token_ids: tuple[int, ...] = (),
    ) -> None:
        socket.send(peer, EngineOutputs(events, stats, request_ids, token_ids, peer.num_received))

    def _start_canary(self) -> None:
        """Run the canary beside the requests: those that run wait for its few steps."""
        if self._proof.is_in_doubt:
            logger.warning("requests fail one after the other: the canary runs")
        self._canary_runs += 1
        request = self._canary.request(self._canary_runs, time.monotonic())
        self._canary_run = CanaryRun(request.request_id)
        self._scheduler.add(request, is_exclusive=True)

    def _judge_canary(self, run: CanaryRun) -> None:
        """Compare the canary's tokens with the golden ones or, without such, with those of the first run.
        Raises CanaryMismatchError when they stay wrong: then only a restart, which loads the weights again,
        can repair the engine. Before it serves, once is enough.
        """
        tokens, why = tuple(run.tokens), run.error or ""
        is_first = not self.canary_tokens
        if is_first and why:
            raise _first_failure(why)
        self.canary_tokens = self.canary_tokens or tokens
        golden = self._golden.find()
        expected = self.canary_tokens if golden is None else golden.tokens
        if tokens and self._faults.due("wrong_canary", self._canary_runs - 2):
            tokens = tokens[:-1] + ((tokens[-1] + self._info.vocab_size // 2) % self._info.vocab_size,)
        outcome = run.outcome(tokens, expected)
        self._proof.checked(outcome, time.monotonic())
        self._heartbeat.proved(self._proof.at)
        if outcome is Outcome.RIGHT:
            if self._heartbeat.sample.reason == _MISMATCH:
                logger.warning("the canary is right again")
                self._heartbeat.set_unready_reason("")
            return
        facts = {"expected": expected, "tokens": tokens, "error": why}
        if outcome is Outcome.INCONCLUSIVE:
            logger.error("the canary did not complete", extra=facts)
            return
        logger.error("the canary is wrong", extra={**facts, "in_a_row": self._proof.num_wrong})
        self._heartbeat.set_unready_reason(_MISMATCH)
        if is_first or self._proof.num_wrong >= MAX_WRONG:
            raise _mismatch(golden, self._proof.num_wrong, has_tokens=not why)

    @property
    def _queue_depth(self) -> int:
        forced = self._faults.get("queue_depth")
        if forced is None:
            return self._scheduler.num_waiting
        self._faults.mark_injected("queue_depth")
        return int(forced.after)

    def _stats(self) -> EngineStats:
        counters = self._scheduler.stats
        deferred = [*self._grammar_queue.requests(), *self._connector.requests()]
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._queue_depth,
            kv_utilization=self._scheduler.kv_utilization,
            batch_size=self._batch_size,
            preemptions=counters.preemptions,
            kv=self._scheduler.kv.stats(),
            blocks_unaccounted=self._unaccounted_blocks,
            speculation=counters.speculation,
            step_tokens=self._step_tokens,
            deferred=len(deferred),
            growth_blocks=self._scheduler.growth_blocks,
            waiting_blocks=self._scheduler.expected_waiting_blocks(deferred),
            transfers=self._connector.stats(),
            adapters=AdapterStats(
                self._adapter_counts[0],
                self._scheduler.adapters.num_resident,
                self._adapter_counts[1],
                self._scheduler.adapters.num_loads,
                self._scheduler.adapters.num_slots,
                *self._adapters.in_use(),
            ),
        )


def _first_failure(why: str) -> Exception:
    """The error of a canary that fails when the server starts."""
    if why != NOT_FINITE:
        return RuntimeError(f"the canary failed: {why}")
    return CanaryMismatchError(
        "The canary, a fixed prompt, gave no finite number when the server started: the model's weights are "
        "damaged, or the node's memory or device is. Copy or download the model again; if other nodes serve "
        "it, look at this one."
    )


def _mismatch(golden: Golden | None, num_wrong: int, *, has_tokens: bool) -> CanaryMismatchError:
    """The error of a canary whose tokens are wrong, or that has none but NaN."""
    than = "at the start of the server" if golden is None else f"pod {golden.pod}, whose tokens are kept"
    what = f"has other tokens than {than}" if has_tokens else "gives no finite number"
    times = f", {num_wrong} times in a row" if num_wrong > 1 else ""
    return CanaryMismatchError(
        f"The canary, a fixed prompt, {what}{times}. The pod restarts and loads its weights again; if it "
        "comes back on the same node, suspect the node's memory or device."
    )


def _log_facts(request_id: str, external_id: str) -> dict[str, str]:
    """What every log line about a request has: its `x-request-id`, as in the lines of the API process, and
    the engine's own id, which begins with the id of the completion.
    """
    return {"request_id": external_id, "engine_request_id": request_id}


def _log_failure(facts: Mapping[str, str], error: str) -> None:
    """A failure that the engine may have caused is an error of the server; others are the request's own."""
    level = logging.ERROR if error in ENGINE_FAILURES else logging.INFO
    logger.log(level, "request failed", extra={**facts, "error": error})
