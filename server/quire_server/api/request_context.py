"""The state of one completion request: its client, its answers' settings, what it took, and its accounting.

`account` awaits the work on a request and reports its end exactly once: to the client, the metrics, the trace
and the log. Knows neither what is asked nor in which shape it is answered.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from quire_http.errors import ApiError, overloaded
from quire_http.exchange import ClientGoneError, CutError, HttpExchange
from quire_server import log
from quire_server.api.admission import Reservation
from quire_server.api.answer_parser import AnswerParser
from quire_server.api.auth import PRINCIPAL, Principal
from quire_server.api.context import ServerContext
from quire_server.api.protocol.errors import (
    ENGINE_UNAVAILABLE,
    OUT_OF_MEMORY,
    from_exception,
)
from quire_server.api.protocol.generation import Generation, TextRules
from quire_server.api.tracing import Attributes
from quire_server.metrics import requests
from quire_server.metrics.requests import Metrics

logger = logging.getLogger(__name__)

DEGRADED_HEADER = "x-quire-degraded"
DEADLINE = "deadline"  # the answer ends early, with what it had
HALVED = "halved_max_tokens"  # a second try, for half of the tokens
_TIMING_HEADER = b"x-quire-token-timing"
_USAGE_HEADER = b"x-quire-usage"
_TOKENS_HEADER = b"x-quire-token-ids"
#: gen_ai.operation.name by route.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
    "/pooling": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
}


class TokenCounts:
    """Token counts over all answers of a request, ``n`` to each prompt."""

    def __init__(self, n: int = 1) -> None:
        self.n = n
        self.completion_tokens = 0
        self.reasoning_tokens = 0  # of these, in thoughts
        self._cached: dict[int, int] = {}
        self.finish_reasons: dict[int, str] = {}  # of the answers that have ended

    def add(self, answer: int, num_tokens: int, num_cached_tokens: int, finish_reason: str | None) -> None:
        """Count what an answer gained."""
        self.completion_tokens += num_tokens
        self._cached[answer] = max(self._cached.get(answer, 0), num_cached_tokens)
        if finish_reason is not None:
            self.finish_reasons[answer] = finish_reason

    @property
    def cached_tokens(self) -> int:
        """Of the prompts. What one answer has computed of a prompt and the others found was not cached."""
        prompts = dict[int, int]()
        for answer, number in self._cached.items():
            prompt = answer // self.n
            prompts[prompt] = min(prompts.get(prompt, number), number)
        return sum(prompts.values())


class Degradation:
    """What was done so that a request gets an answer at all: sent in a header, and counted.

    Each kind counts once, however many answers a request has. A header can only be sent before the response
    has begun, so a stream may be degraded without one.
    """

    def __init__(self, exchange: HttpExchange, metrics: Metrics) -> None:
        self._exchange = exchange
        self._metrics = metrics
        self._reasons: list[str] = []

    def note(self, reason: str) -> None:
        """Report one kind."""
        if reason in self._reasons:
            return
        self._reasons.append(reason)
        self._metrics.degraded(reason)
        others = [(name, value) for name, value in self._exchange.headers if name != DEGRADED_HEADER]
        self._exchange.headers = [*others, (DEGRADED_HEADER, ", ".join(self._reasons))]


class RequestContext:
    """One completion request while it is served."""

    def __init__(self, server: ServerContext, exchange: HttpExchange) -> None:
        self.server = server
        self.exchange = exchange
        self.reservation = Reservation(server.admission)
        self._is_ended = False
        self.arrived_at = time.monotonic()
        self.response_id = uuid.uuid4().hex  # a client may use its request id twice
        self.prompt_tokens = 0
        self.earlier_tokens = 0  # of a try that was given up
        self.counts = TokenCounts()
        self.charged_tokens: int | None = None  # to the client's rate, by estimate
        self.degradation = Degradation(exchange, server.metrics)
        self.transcript = server.request_log.open(server.tokenizer.decode)
        path = exchange.scope["path"]
        arrived = _arrival_attributes(path, exchange.request_id)
        self.span = server.tracing.begin(f"POST {path}", exchange.scope["headers"], arrived)
        # How its answers are generated, see `configure`.
        self.rules = TextRules()
        self.timeout = server.request_timeout  # seconds from the arrival on; may be infinite
        self.is_timed = False  # the client wants to know when each token came
        self.names_tokens = False  # each chunk of a stream says in a comment which tokens it is of
        self.ends_with_usage = False  # a stream has its usage in a comment, whatever the client asked for
        self.is_whole = False  # no part of an answer is looked at before its end
        self.keeps_begun = True  # at its deadline an answer that has begun ends with what it has
        self.scores_only = False  # no token was asked for: the one that the engine always gives is dropped
        self.priority = 0  # lower is more urgent
        self.new_parser: Callable[[int], AnswerParser] | None = None  # of what is in an answer's text

    def configure(self, generation: Generation) -> None:
        """Take over what the parsed request says. Raises ApiError."""
        self.rules = generation.text
        self.counts = TokenCounts(generation.n)
        self.timeout = min(generation.timeout or self.timeout, self.timeout)
        self.is_timed = _switch(self.exchange, _TIMING_HEADER)
        self.names_tokens = _switch(self.exchange, _TOKENS_HEADER) and generation.n == 1
        self.ends_with_usage = _switch(self.exchange, _USAGE_HEADER)
        self.is_whole = not generation.stream and self.transcript is None
        self.keeps_begun = not generation.retry_on_timeout or generation.stream
        self.scores_only = generation.max_tokens == 0
        self.span.describe(f"{self.operation} {generation.model}", _request_attributes(generation))

    def retry(self, now: float) -> None:
        """Begin again, with as much time as before; what has begun by its end is kept."""
        self.earlier_tokens += self.counts.completion_tokens
        self.counts = TokenCounts(self.counts.n)
        self.timeout += now - self.arrived_at
        self.keeps_begun = True

    @property
    def operation(self) -> str:
        """What is done, in OpenTelemetry's words."""
        return _OPERATIONS[self.exchange.scope["path"]]

    @property
    def deadline(self) -> float:
        """When the last token has to be there, by the monotonic clock."""
        return self.arrived_at + self.timeout

    @property
    def completion_tokens(self) -> int:
        """Tokens that were generated for it, sent or not."""
        return self.earlier_tokens + self.counts.completion_tokens

    @property
    def principal(self) -> Principal:
        """Whose key it carries."""
        principal: Principal = self.exchange.scope[PRINCIPAL]
        return principal

    @property
    def client(self) -> str:
        """The name of the API key, empty where there are none."""
        return self.principal.client

    def settle_rate(self, code: int | None) -> None:
        """Charge the client's rate for what it has taken and was not charged for; nothing, where it was
        refused unserved.
        """
        if self.charged_tokens is None:
            return
        if code == 503 and not self.prompt_tokens:
            self.server.rates.refund(self.client)
        tokens = self.prompt_tokens + self.completion_tokens - self.charged_tokens
        self.charged_tokens += tokens
        self.server.rates.spend(self.client, tokens)

    def end(self, status: str, code: int | None = None, error_type: str = "") -> None:
        """Count the request and give back all that it holds, once.

        Its client may send the next request as soon as it has the last byte, and read the metrics: so this
        is called in the same turn of the event loop in which that byte is sent.
        """
        if self._is_ended:
            return
        self._is_ended = True
        self.reservation.release()
        self.server.drain.num_requests -= 1
        self.settle_rate(code)
        _report(self, status, code, error_type)


async def account(request: RequestContext, work: Awaitable[None]) -> None:
    """Whatever happens, the client gets an answer if it is still connected, and the request counts once."""
    server, exchange, status = request.server, request.exchange, "error"
    code: int | None = None
    error_type = ""
    log.request_facts.set({"request_id": exchange.request_id, **request.span.ids})
    server.drain.num_requests += 1
    try:
        await work
    except ClientGoneError:
        status = "aborted"
    except CutError:
        status, error_type = "cancelled", "draining"
        server.metrics.cancelled()
        await exchange.error(overloaded("draining", "The server is going away and its time is over.", 1))
    except Exception as error:  # the boundary of a request: every error becomes its answer
        answer = from_exception(error)
        status, code = _status_name(answer), answer.status
        error_type = answer.code or str(code) if code >= 500 else ""
        if answer.code == OUT_OF_MEMORY:
            request.degradation.note(OUT_OF_MEMORY)
        if answer.code in requests.REFUSALS:
            server.metrics.refused(answer.code)
        if answer.status == 500:
            logger.exception("request failed")
        await exchange.error(answer)
        del (
            answer
        )  # it refers to this frame, and to those that had the body: both would wait for the collector
    finally:
        request.end(status, code, error_type)


def _report(request: RequestContext, status: str, code: int | None, error_type: str) -> None:
    """The end of a request: metrics, trace and log."""
    server = request.server
    seconds = time.monotonic() - request.arrived_at
    server.metrics.request_ended(status, seconds, request.span.exemplar)
    request.span.end(_end_attributes(request, status, code), error_type)
    if server.drain.begun and status == "success":
        server.metrics.drained()
    server.request_log.write(
        {
            "response_id": request.response_id,
            "client": request.client,
            "path": request.exchange.scope["path"],
            "status": status,
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": request.completion_tokens,
            "seconds": round(seconds, 4),
        },
        request.transcript,
    )


def _status_name(answer: ApiError) -> str:
    if answer.status == 503:  # an outage is no load shedding
        return "error" if answer.code in (ENGINE_UNAVAILABLE, OUT_OF_MEMORY) else "shed"
    if answer.status == 429:
        return "limited"
    return "client_error" if answer.status < 500 else "error"


def _switch(exchange: HttpExchange, header: bytes) -> bool:
    """Raises a 400 for a value that is neither true nor false."""
    given = {value.lower() for name, value in exchange.scope["headers"] if name == header}
    if not given <= {b"true", b"false"} or len(given) > 1:
        name = header.decode()
        raise ApiError(400, f"{name}: must be true or false; send it once", param=name)
    return given == {b"true"}


# The attributes of a request's span: OpenTelemetry's conventions for generative AI and for HTTP. Stop
# strings, prompts and answers are the client's text and are in none of them.


def _arrival_attributes(path: str, request_id: str) -> Attributes:
    return {
        "http.request.method": "POST",
        "url.path": path,
        "http.route": path,
        "quire.request.id": request_id,
        "gen_ai.operation.name": _OPERATIONS[path],
        "gen_ai.provider.name": "quire",
    }


def _request_attributes(generation: Generation) -> Attributes:
    sampling = generation.sampling
    known = {
        "gen_ai.request.model": generation.model,
        "gen_ai.response.model": generation.model,
        "gen_ai.request.max_tokens": generation.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stream": generation.stream,
        "gen_ai.request.choice.count": generation.n,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.output.type": "text",
    }
    return {name: value for name, value in known.items() if value is not None}


def _end_attributes(request: RequestContext, status: str, code: int | None) -> Attributes:
    """``code``: the HTTP status, None where no response was sent."""
    counts = request.counts
    return {
        **({} if code is None else {"http.response.status_code": code}),
        "quire.status": status,
        "gen_ai.response.id": request.response_id,
        "gen_ai.response.finish_reasons": tuple(
            counts.finish_reasons[index] for index in sorted(counts.finish_reasons)
        ),
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": counts.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": counts.cached_tokens,
    }
