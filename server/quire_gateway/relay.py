"""Relays one request: chooses a replica, passes its answer on, and asks another one where it fails.

Another replica is asked before the first byte of an answer, never the same one again, and only as often as
the budget of retries allows. After the first byte another one goes on with a stream that is greedy or seeded;
else a failure becomes one error event and the end of the stream, as the engine itself ends one. Bytes are
passed on as they came.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import aiohttp
import orjson

from quire_gateway.accounting import Account
from quire_gateway.activator import Activator, Held, HoldError
from quire_gateway.attempt import Attempt, AttemptError, Upstream, UpstreamRequest
from quire_gateway.dispatch import Destination, Step
from quire_gateway.events import WholeEvents
from quire_gateway.metrics import Metrics
from quire_gateway.openai import canned
from quire_gateway.openai.calls import wants_usage, with_fields, with_half_the_tokens, with_model
from quire_gateway.outlier_detection import Verdict
from quire_gateway.replicas import Model
from quire_gateway.response_cache import Recording
from quire_gateway.resumption import Resumption
from quire_gateway.routing.router import Pick, RequestFacts, Router
from quire_gateway.usage import Usage, without_comment
from quire_http.errors import ApiError, overloaded
from quire_http.exchange import HttpExchange

#: Of a request's headers those that go to a replica; the body's length and the request's id besides.
REQUEST_HEADERS = frozenset(("accept", "content-type", "traceparent", "tracestate", "x-quire-token-timing"))
#: Says that the answer is not what was asked for, and what was done instead.
DEGRADED_HEADER = "x-quire-degraded"
#: Says that an answer is given again.
CACHE_HEADER = "x-quire-cache"
#: Ask a replica for a stream's usage, and for the tokens of each event, in comments.
USAGE_HEADER, TOKENS_HEADER = "x-quire-usage", "x-quire-token-ids"
#: Of an answer's headers those that go to the client.
RESPONSE_HEADERS = frozenset(
    (
        *("cache-control", "content-encoding", "content-type", "retry-after", "server-timing"),
        *("x-accel-buffering", DEGRADED_HEADER),
    )
)
#: Reasons of a 503 that say that the replica is well, but has no room now. Another one may have.
REFUSALS = frozenset(
    (
        *("queue_full", "load_shed", "memory_pressure", "body_memory"),
        *("too_many_connections", "draining", "deadline_exceeded"),
    )
)
_RETRIED = frozenset((502, 503, 504))
_RATE_LIMIT_HEADERS = "x-ratelimit-"
_EVENTS = "text/event-stream"
_MAX_USAGE_BYTES = 512
_MAX_WHOLE_BYTES = 1 << 20  # a longer answer is passed on while it comes
_RETRY_AFTER_SECONDS = 1


class _Refusal(AttemptError):
    """A replica's own answer that another one may do better; kept, because it may be the last."""

    def __init__(self, reason: str, response: aiohttp.ClientResponse, body: bytes) -> None:
        super().__init__(reason, f"HTTP {response.status}")
        self.response = response
        self.body = body


@dataclass(frozen=True, slots=True)
class _Unanswered:
    """Why no replica answered, None: there was none; and which were asked."""

    failure: AttemptError | None
    tried: tuple[str, ...]


class Relay:
    """All that one gateway relays requests with."""

    def __init__(
        self,
        upstream: Upstream,
        metrics: Metrics,
        activator: Activator,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._upstream = upstream
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
        is_open: Callable[[], object],
    ) -> None:
        """Answer the request, by a fallback where no replica of its destination does. Raises ApiError where
        nothing does. ``is_open``: asked after a wait; raises ApiError where it would be refused then.
        """
        destination.retries.add_request()
        until = self._clock() + destination.hold.max_seconds
        held = Held(account.client, request.stream, len(request.body), destination.hold, until, is_open)
        unanswered = await self._ask_awake(exchange, destination, request, facts, account, held)
        for step in destination.fallbacks:
            if unanswered is None:
                return
            changed = _changed(request, destination, step)
            if changed is None or (step.halves_max_tokens and isinstance(unanswered.failure, HoldError)):
                continue
            self._metrics.fell_back(destination.model, step.name)
            account.fell_back = True
            account.recording = None  # of what was asked for
            headers, exchange.headers = exchange.headers, [*exchange.headers, (DEGRADED_HEADER, step.name)]
            if step.canned is not None:
                await _send_canned(exchange, request, destination.model, step.canned, account)
                return
            target = step.destination or destination
            unanswered = await self._ask_awake(exchange, target, changed, facts, account, held, unanswered)
            if unanswered is not None:
                exchange.headers = headers
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
                if avoided or self._activator.is_asleep(destination.replicas):
                    model = await self._activator.wait(exchange, destination.replicas, held, avoided)
                    destination = replace(destination, replicas=model)
                unanswered = await self._ask(exchange, destination, request, facts, account, before)
                if unanswered is None or not self._activator.is_leaving(
                    destination.replicas, unanswered.failure
                ):
                    return unanswered
                before, avoided = unanswered, unanswered.tried
        except HoldError as error:
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
        model, retries = destination.replicas, destination.retries
        router = model.router(destination.strategy)
        account.deployment = model.name
        failure: AttemptError | None = None
        tried: list[str] = []
        original, resumption = request, Resumption() if request.is_resumable else None
        avoided = () if before is None else before.tried
        while len(tried) < destination.attempts:
            candidates = model.candidates([*tried, *avoided]) or model.candidates(tried)
            choice = router.pick(facts, candidates, self._clock())
            if choice is None:
                break
            if failure is not None:
                if not retries.take_retry():
                    break
                self._metrics.retried(model.name, failure.reason, is_resumed=account.has_begun)
            self._metrics.picked(model.name, choice.reason)
            tried.append(choice.replica.endpoint.uid)
            account.replicas.append(choice.replica.endpoint.uid)
            try:
                async with Attempt(self._upstream, model, choice.replica, destination.timeouts) as attempt:
                    await self._attempt(exchange, attempt, request, account, resumption)
                self._learn(model, router, choice, account)
                return None
            except AttemptError as error:
                failure = error
                if account.has_begun and resumption is not None:
                    if not resumption.is_possible:
                        break
                    if (resume := resumption.resume) is not None:
                        request = replace(original, body=with_fields(original.body, resume=resume))
        if account.has_begun and failure is not None:
            account.broken = str(failure)
            await exchange.error(_error_of(failure))
            return None
        last = before.failure if failure is None and before is not None else failure
        return _Unanswered(last, (*avoided, *tried))

    def _learn(self, model: Model, router: Router, choice: Pick, account: Account) -> None:
        """Compare what was expected of the replica's cache with what the answer says."""
        if choice.digests:
            cached = None if account.usage is None else account.usage.cached
            self._metrics.predicted(model.name, choice.num_known > 0, None if cached is None else cached > 0)
            if cached is not None:
                router.answered(choice, cached)

    async def _attempt(
        self,
        exchange: HttpExchange,
        attempt: Attempt,
        request: UpstreamRequest,
        account: Account,
        resumption: Resumption | None,
    ) -> None:
        """Pass one replica's answer on. Raises AttemptError where nothing of it was sent, or another replica
        can go on with it.
        """
        response = await attempt.ask(request)
        goes_on = response.status == 200 and response.content_type == _EVENTS
        if account.has_begun and not goes_on and response.status not in _RETRIED:
            raise AttemptError("resume_refused", f"it does not go on: HTTP {response.status}")
        if response.status in _RETRIED:
            body = await attempt.read_whole()
            reason = _code_of(body)
            if response.status == 503 and reason in REFUSALS:
                attempt.verdict = Verdict.UNKNOWN
            else:
                reason = f"http_{response.status}"
            raise _Refusal(reason, response, body)
        length = _MAX_WHOLE_BYTES + 1 if response.content_length is None else response.content_length
        if exchange.started and not goes_on:
            await _send_as_event(exchange, response.status, await attempt.read_whole(), account)
        elif length <= _MAX_WHOLE_BYTES and not exchange.started:
            body = await attempt.read_whole()
            account.answer_begins(response.status)
            account.read_usage(body)
            await _send_whole(exchange, response, body, account.recording)
        else:
            await _stream(exchange, attempt, response, account, resumption)

    async def _give_up(self, exchange: HttpExchange, failure: AttemptError | None, account: Account) -> None:
        """The last answer that there was, or an error of ours."""
        if isinstance(failure, _Refusal) and exchange.started:
            await _send_as_event(exchange, failure.response.status, failure.body, account)
            return
        if isinstance(failure, HoldError):
            raise overloaded(failure.reason, str(failure), failure.retry_after)
        if isinstance(failure, _Refusal):
            account.answer_begins(failure.response.status)
            await _send_whole(exchange, failure.response, failure.body, None)
            return
        if failure is None:
            raise overloaded("no_replica", "No replica of this model is ready.", _RETRY_AFTER_SECONDS)
        account.broken = str(failure)
        raise _error_of(failure)


def _changed(request: UpstreamRequest, destination: Destination, step: Step) -> UpstreamRequest | None:
    """What is asked of a fallback instead; None where there is nothing to halve."""
    if step.halves_max_tokens:
        body = with_half_the_tokens(request.body)
        return None if body is None else replace(request, body=body)
    if step.destination is None:
        return request
    names = destination.served_name, step.destination.served_name
    return request if names[0] == names[1] else replace(request, body=with_model(request.body, *names))


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
        error = orjson.loads(body)
    except ValueError:
        error = {"error": {"message": f"The replica answered with HTTP {status}.", "code": "replica_error"}}
    await exchange.event(error)
    await exchange.end_stream()


async def _send_whole(
    exchange: HttpExchange, response: aiohttp.ClientResponse, body: bytes, recording: Recording | None
) -> None:
    headers = ((b"content-length", b"%d" % len(body)), *_kept(response, exchange))
    if recording is not None:
        recording.begin(response.status, headers)
        recording.add(body)
        recording.is_whole = True
    await exchange.begin(response.status, headers)
    await exchange.end(body)


async def _stream(
    exchange: HttpExchange,
    attempt: Attempt,
    response: aiohttp.ClientResponse,
    account: Account,
    resumption: Resumption | None,
) -> None:
    """Pass an answer on while it comes. Raises AttemptError where it fails before its first byte, and where
    another replica can go on with it.
    """
    data = await attempt.read()
    events = WholeEvents() if response.content_type == _EVENTS else None
    tail = b""  # in which a usage may begin that the next bytes end
    recording = account.recording
    if not account.has_begun:
        account.answer_begins(response.status)
        headers = tuple(_kept(response, exchange))
        if recording is not None:
            recording.begin(response.status, headers)
    if not exchange.started:
        await exchange.begin(response.status, headers, is_events=events is not None)
    if events is None:
        resumption = None
    try:
        while data:
            whole = events.add(data) if events else data
            account.read_usage(tail + whole)
            if events:
                account.num_events += whole.count(b"\n\n")
                whole, fault = without_comment(whole), ""
                if resumption is not None:
                    whole, fault = resumption.take(whole)
                if whole:
                    await exchange.part(whole)
                if recording is not None:
                    recording.add(whole)
                if fault:
                    raise attempt.failed("engine", f"its engine failed: {fault}")
            else:
                tail = (tail + whole)[-_MAX_USAGE_BYTES:]
                await exchange.part(whole)
            data = await attempt.read()
    except AttemptError as error:
        if resumption is not None and resumption.is_finished:
            await exchange.end(b"" if resumption.is_done else b"data: [DONE]\n\n")
            return
        if resumption is not None:
            raise
        account.broken = str(error)
        await exchange.error(_error_of(error))
        return
    rest = events.rest() if events else b""
    if recording is not None and events is not None:
        recording.add(rest)
        recording.is_whole = True
    await exchange.end(rest)


def _kept(response: aiohttp.ClientResponse, exchange: HttpExchange) -> list[tuple[bytes, bytes]]:
    """The headers that go to the client. Limits of its own are reported in place of the replica's."""
    has_own = any(name.startswith(_RATE_LIMIT_HEADERS) for name, _ in exchange.headers)
    kept = []
    for name, value in response.raw_headers:
        lower = name.decode("latin-1").lower()
        if lower in RESPONSE_HEADERS or (lower.startswith(_RATE_LIMIT_HEADERS) and not has_own):
            kept.append((lower.encode("latin-1"), value))
    return kept


def _code_of(body: bytes) -> str:
    """The code of an error in OpenAI's shape, "" of anything else."""
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


def _error_of(failure: AttemptError) -> ApiError:
    if failure.reason in ("timeout", "idle"):
        message = "The replica that answers did not go on in time."
        return ApiError(504, message, kind="server_error", code="replica_timeout")
    if failure.reason == "unauthorized":
        message = "The replica does not accept requests of this gateway."
        return ApiError(502, message, kind="server_error", code="gateway_refused")
    message = "The replica that answers was lost."
    return ApiError(502, message, kind="server_error", code="replica_lost")
