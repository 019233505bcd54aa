"""OpenTelemetry: one span per completion request, with the child spans queue, prefill and decode, whose times
are the engine's timestamps.

The W3C header traceparent is read even if no spans are exported, so log lines have the client's trace id.
Spans never hold text of prompts or answers.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from quire_server import __version__
from quire_server.core.stats import Timing
from quire_server.metrics.labelled import Exemplar

logger = logging.getLogger(__name__)

_MAX_QUEUED_SPANS = 4096
_PERIOD_MS = 1000
_EXPORT_SECONDS = 5.0
_CLOSE_SECONDS = 2.0
_ERROR_LOG_SECONDS = 60.0
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
    def to(cls, exporter: SpanExporter, sample_ratio: float) -> Tracing:
        """Exports the traces that the client samples, and a share of those that begin here."""
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create(
                {
                    "service.name": "quire-server",
                    "service.version": __version__,
                    "service.instance.id": socket.gethostname(),
                }
            ),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED_SPANS, schedule_delay_millis=_PERIOD_MS)
        )

        def close() -> None:
            # In a daemon thread, so that the process exits without waiting for it: with an unreachable
            # collector the shutdown takes half a minute.
            closing = threading.Thread(target=provider.shutdown, name="tracing", daemon=True)
            closing.start()
            closing.join(_CLOSE_SECONDS)

        return cls(provider.get_tracer("quire_server", __version__), close)

    @classmethod
    def over_otlp(cls, endpoint: str, sample_ratio: float) -> Tracing:
        """Exports to a collector over HTTP; `endpoint` as in OTEL_EXPORTER_OTLP_ENDPOINT."""
        # The SDK logs each failed attempt and each dropped span; the exporter below logs once a minute.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        url = endpoint.rstrip("/") + "/v1/traces"
        exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_SECONDS)
        return cls.to(RateLimitedErrorLog(exporter, url, time.monotonic), sample_ratio)

    def begin(self, name: str, headers: Headers, attributes: Attributes) -> RequestSpan:
        """Start the span of a request that has arrived."""
        return RequestSpan(self._tracer, name, headers, attributes)

    def close(self) -> None:
        """Export the remaining spans, for two seconds at most."""
        self._close()


class RateLimitedErrorLog(SpanExporter):
    """Logs failed exports at most once a minute, with the number of spans lost."""

    def __init__(self, inner: SpanExporter, url: str, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._url = url
        self._clock = clock
        self._num_lost = 0
        self._logged_at = float("-inf")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export; runs in the SDK's thread."""
        result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._num_lost += len(spans)
            if self._clock() - self._logged_at >= _ERROR_LOG_SECONDS:
                self._logged_at = self._clock()
                logger.warning(
                    "the collector takes no spans", extra={"url": self._url, "lost": self._num_lost}
                )
                self._num_lost = 0
        return result

    def shutdown(self) -> None:
        """End retries."""
        self._inner.shutdown()
