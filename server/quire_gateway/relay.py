"""Relays one request: chooses a replica, passes its answer on, and asks another one where it fails.

Another replica is asked before the first byte of an answer, never the same one again, and only as often as
the budget of retries allows; where a route hedges, also beside one that is slow. After the first byte another
one goes on with a stream that is greedy or seeded; else a failure becomes one error event and the end of the
stream, as the engine itself ends one. Bytes are passed on as they came.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import orjson
from yarl import URL

from quire_gateway.accounting import Account
from quire_gateway.activator import HOLD_FULL, Activator, Held, HoldError
from quire_gateway.attempt import MAX_WHOLE_BYTES, Attempt, AttemptError, Upstream, UpstreamRequest
from quire_gateway.attempt_plan import AttemptPlan
from quire_gateway.dispatch import Destination, Step
from quire_gateway.events import WholeEvents
from quire_gateway.external_models import ExternalModel
from quire_gateway.hedging import race
from quire_gateway.llm_route import OVERLOAD, UNAVAILABLE
from quire_gateway.metrics import Metrics
from quire_gateway.openai import canned
from quire_gateway.openai.calls import (
    COMPLETION_PATHS,
    num_answers,
    wants_usage,
    with_fields,
    with_half_the_tokens,
    with_model,
)
from quire_gateway.openai.external import ExternalEvents
from quire_gateway.outlier_detection import Verdict
from quire_gateway.relay_failures import (
    RETRY_AFTER_SECONDS,
    NoAdapterError,
    NotKeptError,
    OtherApiError,
    Refusal,
    SwitchedOffError,
    code_of,
    error_of,
    refusal_of,
)
from quire_gateway.replica import Replica
from quire_gateway.replicas import Model
from quire_gateway.response_cache import Headers, Recording
from quire_gateway.resumption import Resumption
from quire_gateway.routing.router import Pick, RequestFacts, Router
from quire_gateway.settings import Timeouts
from quire_gateway.tracing import HEADERS as TRACE_HEADERS
from quire_gateway.tracing import AttemptSpan
from quire_gateway.usage import Usage, without_comment
from quire_http.errors import ApiError, overloaded
from quire_http.exchange import HttpExchange

#: Of a request's headers those that go to a replica; the body's length and the request's id besides.
REQUEST_HEADERS = frozenset(("accept", "content-type", *TRACE_HEADERS, "x-quire-token-timing"))
#: Says that the answer is not what was asked for, and what was done instead.
DEGRADED_HEADER = "x-quire-degraded"
#: Says that an answer is given again.
CACHE_HEADER = "x-quire-cache"
#: Ask a replica for a stream's usage, and for the tokens of each event, in comments.
USAGE_HEADER, TOKENS_HEADER = "x-quire-usage", "x-quire-token-ids"
#: Reasons of a 503 that say that the replica is well, but has no room now. Another one may have.
REFUSALS = frozenset(
    (
        *("queue_full", "load_shed", "memory_pressure", "body_memory"),
        *("too_many_connections", "draining", "deadline_exceeded"),
    )
)
#: Why there is a second attempt beside the first.
HEDGE = "hedge"
_RETRIED = frozenset((502, 503, 504))
#: Failures for lack of room, after which `onlyOn` has Overload; after all others it has Unavailable.
_OVERLOAD = REFUSALS | {HOLD_FULL, "rate_limited"}
_RATE_LIMIT_HEADERS, _RATE_LIMITS = "x-ratelimit-", b"x-ratelimit-"
_EVENTS = "text/event-stream"
_MAX_USAGE_BYTES = 512


@dataclass(frozen=True, slots=True)
class _Unanswered:
    """Why no replica answered, None: there was none; and which were asked."""

    failure: AttemptError | None
    tried: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    """That of one replica, of which nothing is sent yet."""

    choice: Pick
    attempt: Attempt
    response: aiohttp.ClientResponse

    def close(self) -> None:
        """It is not needed."""
        self.attempt.end()


class Relay:
    """All that one gateway relays requests with."""

    def __init__(
        self,
        upstream: Upstream,
        external: Upstream,
        metrics: Metrics,
        activator: Activator,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._upstream = upstream
        self._external = external
        self._metrics = metrics
        self._activator = activator
        self._clock = clock

    async def relay(
        self,
        exchange: HttpExchange,
        destination: Destination,
        request: UpstreamRequest,
        facts: RequestFacts,
        account: Account,
        current: Callable[[], Destination],
    ) -> None:
        """Answer the request, by a fallback where no replica of its destination does. Raises ApiError where
        nothing does. ``current``: the destination that it would have now, asked when it has waited; raises
        ApiError where it would be refused.
        """
        destination.retries.add_request()
        until = self._clock() + destination.hold.max_seconds
        is_open = partial(_check_open, destination, current)
        held = Held(account.client, request.stream, len(request.body), destination.hold, until, is_open)
        unanswered: _Unanswered | None
        if destination.kill_switch is None:
            unanswered = await self._ask_awake(exchange, destination, request, facts, account, held)
        else:
            unanswered = _Unanswered(SwitchedOffError(destination), ())
        if unanswered is None:
            return
        original, steps = unanswered.failure, deque(destination.fallbacks)
        if isinstance(original, SwitchedOffError):
            steps = deque(original.fallbacks)
        while steps and unanswered is not None:
            step = steps.popleft()
            held = held._replace(is_open=partial(_check_open, destination, current, step))
            changed = _changed(request, destination, step)
            if changed is None or not _applies(step, original):
                continue
            if not account.reprice((step.destination or destination).prices):
                continue
            self._metrics.fell_back(destination.model, step.name)
            account.fallback = step.name
            account.recording = None  # of what was asked for
            with _degraded(exchange, step.name):
                if step.canned is not None:
                    await _send_canned(exchange, request, destination.model, step.canned, account)
                    return
                to = step.destination or destination
                unanswered = await self._ask_awake(exchange, to, changed, facts, account, held, unanswered)
            if unanswered is not None and isinstance(unanswered.failure, SwitchedOffError):
                open_still = {one.name for one in unanswered.failure.fallbacks}
                steps = deque(one for one in steps if one.name in open_still)
        if unanswered is not None:
            await self._give_up(exchange, unanswered.failure, account)

    async def _ask_awake(
        self,
        exchange: HttpExchange,
        destination: Destination,
        request: UpstreamRequest,
        facts: RequestFacts,
        account: Account,
        held: Held,
        before: _Unanswered | None = None,
    ) -> _Unanswered | None:
        """As `_ask`; where the model's pods have stopped one is started, and the request waits for it."""
        avoided: tuple[str, ...] = ()
        try:
            while True:
                if (unasked := _unasked(destination.replicas, request, before)) is not None:
                    return unasked  # no pod is started for what it cannot answer
                model, adapter = destination.replicas, destination.adapter
                if avoided or self._activator.is_asleep(model, adapter):
                    begun = self._clock()
                    try:
                        model = await self._activator.wait(exchange, model, held, avoided, adapter)
                    finally:
                        account.held_seconds += self._clock() - begun
                    # A pod that has just started is slow, and others wait for it.
                    destination = destination._replace(replicas=model, hedge_seconds=None)
                unanswered = await self._ask(exchange, destination, request, facts, account, before)
                if unanswered is None or not self._activator.is_leaving(model, unanswered.failure, adapter):
                    return unanswered
                before, avoided = unanswered, unanswered.tried
                if isinstance(unanswered.failure, NoAdapterError):
                    avoided = ()  # they will have it
        except (HoldError, SwitchedOffError) as error:
            return _Unanswered(error, () if before is None else before.tried)

    async def _ask(
        self,
        exchange: HttpExchange,
        destination: Destination,
        request: UpstreamRequest,
        facts: RequestFacts,
        account: Account,
        before: _Unanswered | None = None,
    ) -> _Unanswered | None:
        """Ask replicas until one answers; None once one did. ``before``: where it was asked for before, and
        replicas that have failed are asked last.
        """
        model, failure = destination.replicas, None
        router = model.router(destination.strategy)
        account.deployment = model.name
        is_external = isinstance(model, ExternalModel)
        if (unasked := _unasked(model, request, before)) is not None:
            return unasked
        original = request = _for_adapter(request, destination)
        resumption = Resumption() if request.is_resumable and not is_external else None
        avoided = () if before is None else before.tried
        limits, adapter = (destination.retries, destination.attempts), destination.adapter
        plan = AttemptPlan(model, router, facts, *limits, avoided, request.kept_by, adapter)

        async def start(choice: Pick, reason: str) -> _Answer:
            attempt = self._attempt_at(destination, choice, reason, account)
            try:
                response = await self._response(exchange, attempt, request, account)
                await self._check_adapter(adapter, choice.replica, attempt, response)
            except BaseException as error:
                attempt.end(error)
                raise
            return _Answer(choice, attempt, response)

        def hedge() -> Coroutine[Any, Any, _Answer] | None:
            choice = plan.hedge(self._clock())
            return None if choice is None else start(choice, HEDGE)

        while (choice := plan.next(self._clock())) is not None:
            is_first = failure is None and not exchange.started and not is_external
            seconds = destination.hedge_seconds if is_first and request.is_hedgeable else None
            first = start(choice, "" if failure is None else failure.reason)
            try:
                answer = await (first if seconds is None else race(first, seconds, hedge))
                with answer.attempt:
                    await self._pass_on(exchange, answer, request, account, resumption)
                self._learn(model, router, answer.choice, account)
                return None
            except AttemptError as error:
                failure = error
                if account.has_begun and resumption is not None:
                    if not resumption.is_possible:
                        break
                    if (resume := resumption.resume) is not None:
                        request = original._replace(body=with_fields(original.body, resume=resume))
        if account.has_begun and failure is not None:
            await _break_off(exchange, failure, account)
            return None
        last = _last_failure(failure, before, adapter if model.replicas else "")
        return _Unanswered(last, (*avoided, *plan.tried))

    async def relay_kept(
        self,
        exchange: HttpExchange,
        model: Model,
        replica: Replica,
        timeouts: Timeouts,
        request: UpstreamRequest,
    ) -> int:
        """What one replica says about a response that it keeps, of any length; returns the status. Raises
        ApiError.
        """
        try:
            with Attempt(self._upstream, model, replica, timeouts) as attempt:
                response = await attempt.ask(request)
                data, length = await attempt.read(), response.content_length
                known = () if length is None else ((b"content-length", b"%d" % length),)
                await exchange.begin(response.status, (*known, *_kept(attempt, response, exchange)))
                while data:
                    await exchange.part(data)
                    data = await attempt.read()
                await exchange.end()
                return response.status
        except AttemptError as error:
            raise error_of(error) from None

    def _attempt_at(self, destination: Destination, choice: Pick, reason: str, account: Account) -> Attempt:
        """An attempt that begins. ``reason``: why there is one, empty for the first."""
        model, uid = destination.replicas, choice.replica.endpoint.uid
        if reason:
            self._metrics.retried(model.name, reason, is_resumed=account.has_begun)
        self._metrics.picked(model.name, choice.reason)
        account.replicas.append(uid)
        upstream = self._external if isinstance(model, ExternalModel) else self._upstream
        span = _span_of(account, destination, choice, reason)
        return Attempt(upstream, model, choice.replica, destination.timeouts, span=span)

    def _learn(self, model: Model, router: Router, choice: Pick, account: Account) -> None:
        """Compare what was expected of the replica's cache with what the answer says."""
        if choice.digests:
            cached = None if account.usage is None else account.usage.cached
            self._metrics.predicted(model.name, choice.num_known > 0, None if cached is None else cached > 0)
            if cached is not None:
                router.answered(choice, cached)

    async def _response(
        self, exchange: HttpExchange, attempt: Attempt, request: UpstreamRequest, account: Account
    ) -> aiohttp.ClientResponse:
        """The head of one replica's answer. Raises AttemptError where another one may do better."""
        response = await attempt.ask(request)
        goes_on = _goes_on(response)
        if account.has_begun and not goes_on and response.status not in _RETRIED:
            raise AttemptError("resume_refused", f"it does not go on: HTTP {response.status}")
        if response.status in _RETRIED:
            body = await attempt.read_whole()
            reason = code_of(body)
            if response.status == 503 and reason in REFUSALS:
                attempt.verdict = Verdict.UNKNOWN
            else:
                reason = f"http_{response.status}"
            raise Refusal(reason, response, _kept(attempt, response, exchange), body)
        return response

    async def _check_adapter(
        self, adapter: str, replica: Replica, attempt: Attempt, response: aiohttp.ClientResponse
    ) -> None:
        """Raise AttemptError where a replica that was asked for an adapter does not have it."""
        length = response.content_length
        if not adapter or response.status != 404 or length is None or length > MAX_WHOLE_BYTES:
            return
        if code_of(await attempt.read_whole()) == "model_not_found":
            replica.lacks_adapter(adapter, self._clock())
            raise NoAdapterError(adapter)

    async def _pass_on(
        self,
        exchange: HttpExchange,
        answer: _Answer,
        request: UpstreamRequest,
        account: Account,
        resumption: Resumption | None,
    ) -> None:
        """Pass one replica's answer on. Raises AttemptError where nothing of it was sent, or another replica
        can go on with it.
        """
        attempt, response = answer.attempt, answer.response
        goes_on = _goes_on(response)
        length = MAX_WHOLE_BYTES + 1 if response.content_length is None else response.content_length
        if exchange.started and not goes_on:
            await _send_as_event(exchange, response.status, await attempt.read_whole(), account)
        elif length <= MAX_WHOLE_BYTES and not exchange.started:
            body = await attempt.read_whole()
            account.answer_begins(response.status)
            account.read_usage(body)
            await _send_whole(exchange, response, body, _kept(attempt, response, exchange), account.recording)
        else:
            events = _events_of(attempt, response, request)
            await _stream(exchange, attempt, response, account, events, resumption)

    async def _give_up(self, exchange: HttpExchange, failure: AttemptError | None, account: Account) -> None:
        """The last answer that there was, or an error of ours."""
        if isinstance(failure, Refusal) and exchange.started:
            await _send_as_event(exchange, failure.response.status, failure.body, account)
            return
        if isinstance(failure, Refusal):
            account.answer_begins(failure.response.status)
            await _send_whole(exchange, failure.response, failure.body, failure.headers, None)
            return
        if failure is None:
            raise overloaded("no_replica", "No replica of this model is ready.", RETRY_AFTER_SECONDS)
        if (refusal := refusal_of(failure)) is not None:
            raise refusal
        account.breaks(failure.reason, str(failure))
        raise error_of(failure)


def _unasked(model: Model, request: UpstreamRequest, before: _Unanswered | None) -> _Unanswered | None:
    """Why no replica of a model can be asked; None where one can."""
    if isinstance(model, ExternalModel) and request.path not in COMPLETION_PATHS:
        return _Unanswered(OtherApiError(request.path), ()) if before is None else before
    if request.kept_by is not None and model.keeper(request.kept_by) is None:
        return _Unanswered(NotKeptError(), ())
    return None


def _for_adapter(request: UpstreamRequest, destination: Destination) -> UpstreamRequest:
    """What is sent for an adapter: signed so that no replica without it answers by the model itself."""
    return request._replace(asked_model="") if destination.adapter else request


def _last_failure(
    failure: AttemptError | None, before: _Unanswered | None, adapter: str
) -> AttemptError | None:
    """Why no replica answered. ``adapter``: which the replicas that there are would have to have."""
    if failure is None and adapter:
        return NoAdapterError(adapter)
    return before.failure if failure is None and before is not None else failure


async def _break_off(exchange: HttpExchange, failure: AttemptError, account: Account) -> None:
    """End a stream that has begun with an error event."""
    account.breaks(failure.reason, str(failure))
    exchange.num_events = account.num_events
    await exchange.error(error_of(failure))


def _goes_on(response: aiohttp.ClientResponse) -> bool:
    """Whether an answer is a stream of events, as one that has begun is."""
    return response.status == 200 and response.content_type == _EVENTS


def _span_of(account: Account, destination: Destination, choice: Pick, reason: str) -> AttemptSpan | None:
    """The span of an attempt, the next one of its request."""
    if account.span is None:
        return None
    number, model, endpoint = len(account.replicas), destination.replicas, choice.replica.endpoint
    url = URL(endpoint.url, encoded=True)
    return account.span.attempt(
        destination.served_name,
        {
            "server.address": url.host,
            "server.port": url.port,
            "http.request.resend_count": number - 1 or None,
            "quire.retry.reason": reason or None,
            "quire.deployment": model.audience,
            "quire.replica": endpoint.uid,
            "quire.pick.reason": choice.reason,
            "quire.resumed": account.has_begun or None,
        },
    )


@contextmanager
def _degraded(exchange: HttpExchange, step: str) -> Iterator[None]:
    """An answer that begins within it says which step it is by, and none that begins afterwards."""
    headers, exchange.headers = exchange.headers, [*exchange.headers, (DEGRADED_HEADER, step)]
    try:
        yield
    finally:
        exchange.headers = headers


def _with_own_degradation(exchange: HttpExchange, headers: Headers) -> Headers:
    """The headers of an answer to begin: what a replica says of it is said after the step, in one header."""
    steps = [value for name, value in exchange.headers if name == DEGRADED_HEADER]
    if not steps:
        return headers
    said = [value for name, value in headers if name == DEGRADED_HEADER.encode()]
    if not said:
        return headers
    others = [(name, value) for name, value in exchange.headers if name != DEGRADED_HEADER]
    exchange.headers = [
        *others,
        (DEGRADED_HEADER, ", ".join((*steps, *(one.decode("latin-1") for one in said)))),
    ]
    return tuple(one for one in headers if one[0] != DEGRADED_HEADER.encode())


def _check_open(begun: Destination, current: Callable[[], Destination], step: Step | None = None) -> None:
    """Raise SwitchedOffError where a kill switch came on while the request waits for its target, or for a
    fallback that it takes away; and the ApiError of ``current``.
    """
    now = current()
    if now.kill_switch is None or (step is None and begun.kill_switch is not None):
        return
    if step is None or all(one.name != step.name for one in now.fallbacks):
        raise SwitchedOffError(now)


def _applies(step: Step, failure: AttemptError | None) -> bool:
    """Whether a fallback is for this failure of the target; None: it had no replica."""
    if step.halves_max_tokens and isinstance(failure, HoldError):
        return False
    is_overload = failure is not None and failure.reason in _OVERLOAD
    return not step.only_on or (OVERLOAD if is_overload else UNAVAILABLE) in step.only_on


def _changed(request: UpstreamRequest, destination: Destination, step: Step) -> UpstreamRequest | None:
    """What is asked of a fallback instead; None where there is nothing to halve."""
    if step.halves_max_tokens:
        body = with_half_the_tokens(request.body)
        return None if body is None else request._replace(body=body)
    if step.destination is None:
        return request
    names = destination.served_name, step.destination.served_name
    return request if names[0] == names[1] else request._replace(body=with_model(request.body, *names))


async def _send_canned(
    exchange: HttpExchange, request: UpstreamRequest, model: str, text: str, account: Account
) -> None:
    """Answer with a text of the route's."""
    facts = request.path, model, text, exchange.request_id, int(time.time())
    if request.stream:
        content_type = b"text/event-stream; charset=utf-8"
        body = canned.stream(*facts, include_usage=wants_usage(request.body))
    else:
        content_type, body = b"application/json", canned.answer(*facts)
    account.deployment, account.usage = "", Usage(0, 0)
    account.answer_begins(200)
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    if not exchange.started:
        await exchange.begin(200, headers, is_events=request.stream)
    await exchange.end(body)


async def _send_as_event(exchange: HttpExchange, status: int, body: bytes, account: Account) -> None:
    """An answer that is an error, in a stream that has begun while its request waited."""
    account.answer_begins(status)
    try:
        said = orjson.loads(body)["error"]
        fields = said["message"], said["type"], said["param"], said["code"]
    except (ValueError, KeyError, TypeError):
        fields = f"The replica answered with HTTP {status}.", "server_error", None, "replica_error"
    message, kind, param, code = fields
    await exchange.error(ApiError(status, message, kind=kind, param=param, code=code))


async def _send_whole(
    exchange: HttpExchange,
    response: aiohttp.ClientResponse,
    body: bytes,
    kept: Headers,
    recording: Recording | None,
) -> None:
    headers = ((b"content-length", b"%d" % len(body)), *kept)
    if recording is not None:
        recording.begin(response.status, headers)
        recording.add(body)
        recording.is_whole = True
    await exchange.begin(response.status, _with_own_degradation(exchange, headers))
    await exchange.end(body)


async def _stream(
    exchange: HttpExchange,
    attempt: Attempt,
    response: aiohttp.ClientResponse,
    account: Account,
    events: WholeEvents | None,
    resumption: Resumption | None,
) -> None:
    """Pass an answer on while it comes. Raises AttemptError where it fails before its first byte, and where
    another replica can go on with it.
    """
    data = await attempt.read()
    filtered = events if isinstance(events, ExternalEvents) else resumption if events else None
    tail = b""  # in which a usage may begin that the next bytes end
    recording = account.recording
    if not account.has_begun:
        account.answer_begins(response.status)
        headers = _kept(attempt, response, exchange)
        if recording is not None:
            recording.begin(response.status, headers)
    if not exchange.started:
        headers = _with_own_degradation(exchange, headers)
        await exchange.begin(response.status, headers, is_events=events is not None)
    try:
        while data:
            whole = events.add(data) if events else data
            if events:
                account.read_events(whole)
                whole, fault = without_comment(whole), ""
                if filtered is not None:
                    whole, fault = filtered.take(whole)
                if whole:
                    await exchange.part(whole)
                if recording is not None:
                    recording.add(whole)
                if fault:
                    raise attempt.failed("engine", f"its engine failed: {fault}")
            else:
                account.read_part(tail + whole)
                tail = (tail + whole)[-_MAX_USAGE_BYTES:]
                await exchange.part(whole)
            data = await attempt.read()
        rest = events.rest() if events else b""
        if events is None:
            account.read_usage(tail)
        if isinstance(events, ExternalEvents) and not events.is_finished:
            raise attempt.failed("cut", "the answer ends without an end")
    except AttemptError as error:
        if filtered is not None and filtered.is_finished:
            await exchange.end(b"" if filtered.is_done else b"data: [DONE]\n\n")
            return
        if isinstance(filtered, Resumption):
            raise
        await _break_off(exchange, error, account)
        return
    if recording is not None and events is not None:
        recording.add(rest)
        recording.is_whole = True
    await exchange.end(rest)


def _events_of(
    attempt: Attempt, response: aiohttp.ClientResponse, request: UpstreamRequest
) -> WholeEvents | None:
    """What finds the events of an answer; None of one that is no stream."""
    if response.content_type != _EVENTS:
        return None
    if isinstance(attempt.model, ExternalModel):
        return ExternalEvents(keeps_usage=wants_usage(request.body), num_answers=num_answers(request.body))
    return WholeEvents()


def _kept(attempt: Attempt, response: aiohttp.ClientResponse, exchange: HttpExchange) -> Headers:
    """The headers that go to the client. Limits of its own are reported in place of the replica's; an
    external backend's are of the gateway's account there.
    """
    is_external = isinstance(attempt.model, ExternalModel)
    has_own = is_external or any(name.startswith(_RATE_LIMIT_HEADERS) for name, _ in exchange.headers)
    kept = []
    for name, value in response.raw_headers:
        lower = name.lower()
        if lower in attempt.response_headers or (not has_own and lower.startswith(_RATE_LIMITS)):
            kept.append((lower, value))
    return tuple(kept)
