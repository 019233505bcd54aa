"""OpenTelemetry: one span per completion request, with the child spans queue, prefill and decode, whose times
are the engine's timestamps.

The W3C header traceparent is read even if no spans are exported, so log lines have the client's trace id.
Spans never hold text of prompts or answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from quire_server import __version__
from quire_server.core.stats import Timing
from quire_server.metrics.labelled import Exemplar

_NANO = 1_000_000_000

Attributes = Mapping[str, AttributeValue]
Headers = Iterable[tuple[bytes, bytes]]


class RequestSpan:
    """The span of one request, from its arrival to its end."""

    def __init__(self, tracer: Tracer, name: str, headers: Headers, attributes: Attributes) -> None:
        carrier = {
            key.decode("latin-1"): value.decode("latin-1")
            for key, value in headers
            if key in (b"traceparent", b"tracestate")
        }
        now = time.time_ns()
        # Computed once per request, so that a change of the wall clock does not shift its child spans.
        self._offset = now - int(time.monotonic() * _NANO)
        self._tracer = tracer
        self._span = tracer.start_span(
            name,
            TraceContextTextMapPropagator().extract(carrier),
            SpanKind.SERVER,
            attributes,
            start_time=now,
        )
        self._is_recording = self._span.is_recording()
        self._num_preemptions = 0

    @property
    def ids(self) -> dict[str, str]:
        """trace_id and span_id for log lines; empty without a trace."""
        context = self._span.get_span_context()
        if not context.is_valid:
            return {}
        return {
            "trace_id": trace.format_trace_id(context.trace_id),
            "span_id": trace.format_span_id(context.span_id),
        }

    @property
    def exemplar(self) -> Exemplar | None:
        """The ids as an exemplar for metrics; None if the trace is not exported."""
        return self.ids if self._is_recording else None

    def describe(self, name: str, attributes: Attributes) -> None:
        """Set the span's name and attributes once the request is parsed."""
        if self._is_recording:
            self._span.update_name(name)
            self._span.set_attributes(attributes)

    def answered(self, index: int, timing: Timing) -> None:
        """Add the child spans of one finished answer."""
        if not self._is_recording or timing.finished is None:
            return
        self._num_preemptions += timing.preemptions
        self._span.set_attribute("quire.preemptions", self._num_preemptions)
        if index == 0:
            self._span.set_attributes(_latencies(timing))
        context = trace.set_span_in_context(self._span)
        attributes = {"quire.choice.index": index}
        for name, begin, end in (
            ("queue", timing.queued, timing.scheduled),
            ("prefill", timing.scheduled, timing.first_token),
            ("decode", timing.first_token, timing.finished),
        ):
            child = self._tracer.start_span(
                name, context, SpanKind.INTERNAL, attributes, start_time=self._wall(begin)
            )
            child.end(self._wall(end))

    def end(self, attributes: Attributes, error: str = "") -> None:
        """End the span; `error` is the kind of a failure of the server."""
        if self._is_recording:
            self._span.set_attributes(attributes)
            if error:
                self._span.set_attribute("error.type", error)
                self._span.set_status(Status(StatusCode.ERROR, error))
            self._span.end()

    def _wall(self, monotonic: float) -> int:
        return int(monotonic * _NANO) + self._offset


def _latencies(timing: Timing) -> Attributes:
    """Attributes under vLLM's names, which existing dashboards read."""
    assert timing.finished is not None
    return {
        "gen_ai.latency.time_in_queue": timing.scheduled - timing.queued,
        "gen_ai.latency.time_in_model_prefill": timing.first_token - timing.scheduled,
        "gen_ai.latency.time_in_model_decode": timing.finished - timing.first_token,
        "gen_ai.latency.time_in_model_inference": timing.finished - timing.scheduled,
    }


class Tracing:
    """Creates the spans of requests and exports them."""

    def __init__(self, tracer: Tracer, close: Callable[[], None]) -> None:
        self._tracer = tracer
        self._close = close

    @classmethod
    def off(cls) -> Tracing:
        """Without an exporter; a client's own trace id is still in the logs."""
        return cls(trace.NoOpTracer(), lambda: None)

    @classmethod
    def over_otlp(cls, endpoint: str, sample_ratio: float) -> Tracing:
        """Exports to a collector what the client samples, and a share of the traces that begin here."""
        from quire_http import otlp  # noqa: PLC0415  # a tenth of the start, for few

        resource = {"service.name": "quire-server", "service.version": __version__}
        provider = otlp.provider_over_otlp(endpoint, sample_ratio, resource)
        return cls(provider.get_tracer("quire_server", __version__), partial(otlp.close, provider))

    def begin(self, name: str, headers: Headers, attributes: Attributes) -> RequestSpan:
        """Start the span of a request that has arrived."""
        return RequestSpan(self._tracer, name, headers, attributes)

    def close(self) -> None:
        """Export the remaining spans, for two seconds at most."""
        self._close()
