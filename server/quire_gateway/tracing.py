"""OpenTelemetry: one span of each relayed request, and one of each attempt, whose context the replica gets.

So the spans of a gateway and of an engine are one tree: the client's span, this request, its attempts, and
what the engine did in each. Names and attributes are OpenTelemetry's for HTTP and generative AI, with the
engine's own where these have none. No prompt, no answer and no key is in a span, and external backends get no
context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from quire_gateway.openai import calls
from quire_http import dialects

#: The headers of a request that say which trace it is of. With tracing each attempt has its own.
HEADERS = frozenset(("traceparent", "tracestate"))
_OPERATIONS = {
    dialects.CHAT: "chat",
    dialects.COMPLETIONS: "text_completion",
    dialects.MESSAGES: "chat",
    dialects.COUNT_TOKENS: "count_tokens",
    dialects.RESPONSES: "chat",
    calls.EMBEDDINGS: "embeddings",
    calls.POOLING: "embeddings",
    calls.RERANK: "rerank",
    calls.SCORE: "score",
}

Attributes = Mapping[str, AttributeValue | None]


class Tracing:
    """Makes the spans of one gateway's requests. ``close`` exports what remains."""

    def __init__(self, tracer: Tracer, close: Callable[[], None]) -> None:
        self._tracer = tracer
        self.close = close

    def begin(self, path: str, request_id: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestSpan:
        """The span of a request that has arrived, in its client's trace where it has one."""
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name.decode("latin-1") in HEADERS
        }
        return RequestSpan(self._tracer, path, request_id, carrier)


class RequestSpan:
    """The span of one request, from its arrival to its end."""

    def __init__(self, tracer: Tracer, path: str, request_id: str, carrier: Mapping[str, str]) -> None:
        self._tracer = tracer
        self._operation = _OPERATIONS[path]
        self._span = tracer.start_span(
            f"POST {path}",
            TraceContextTextMapPropagator().extract(carrier, Context()),
            SpanKind.SERVER,
            {
                "http.request.method": "POST",
                "url.path": path,
                "http.route": path,
                "quire.request.id": request_id,
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": "quire",
            },
        )
        self._context = trace.set_span_in_context(self._span, Context())

    @property
    def ids(self) -> dict[str, str]:
        """trace_id and span_id for the access log."""
        context = self._span.get_span_context()
        return {
            "trace_id": trace.format_trace_id(context.trace_id),
            "span_id": trace.format_span_id(context.span_id),
        }

    def describe(self, model: str, attributes: Attributes) -> None:
        """It is known what is asked for."""
        if self._span.is_recording():
            self._span.update_name(f"{self._operation} {model}")
            self._span.set_attributes(_known({"gen_ai.request.model": model, **attributes}))

    def attempt(self, served_name: str, attributes: Attributes) -> AttemptSpan:
        """The span of an attempt, which begins now. ``served_name``: the name of the model that is sent."""
        common = {"http.request.method": "POST", "gen_ai.operation.name": self._operation}
        span = self._tracer.start_span(
            f"{self._operation} {served_name}",
            self._context,
            SpanKind.CLIENT,
            _known({**common, "gen_ai.request.model": served_name, **attributes}),
        )
        return AttemptSpan(span)

    def end(self, attributes: Attributes, error: str = "") -> None:
        """It is over. ``error``: the kind of a failure of ours, or of all that could have answered."""
        _end(self._span, attributes, error)


class AttemptSpan:
    """The span of one attempt, from its choice until its connection is given back."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def headers(self) -> dict[str, str]:
        """What makes the replica's span the child of this one."""
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier

    def end(self, attributes: Attributes, error: str = "") -> None:
        """It is over. ``error``: the reason for which it failed, as in the metrics."""
        _end(self._span, attributes, error)


def _end(span: trace.Span, attributes: Attributes, error: str) -> None:
    if span.is_recording():
        span.set_attributes(_known(attributes))
        if error:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()


def _known(attributes: Attributes) -> dict[str, AttributeValue]:
    return {name: value for name, value in attributes.items() if value is not None}
