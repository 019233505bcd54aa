"""Exports spans to a collector, by OTLP over HTTP and in a thread: of every server of ours that makes spans.

The address comes from the settings; OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE,
OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have their usual meanings. A collector that is away costs spans
and one line of the log a minute, never a request. Knows no request: what a span says is decided by its maker.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

logger = logging.getLogger(__name__)

_MAX_QUEUED_SPANS = 4096
_PERIOD_MS = 1000
_EXPORT_SECONDS = 5.0
_CLOSE_SECONDS = 2.0
_ERROR_LOG_SECONDS = 60.0


def provider_over_otlp(endpoint: str, sample_ratio: float, resource: dict[str, str]) -> TracerProvider:
    """Exports the traces that the client samples, and a share of those that begin here. ``endpoint``: as in
    OTEL_EXPORTER_OTLP_ENDPOINT. ``resource``: which server it is.
    """
    # The SDK logs each failed attempt and each dropped span; the exporter below logs once a minute.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    url = endpoint.rstrip("/") + "/v1/traces"
    exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_SECONDS)
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        resource=Resource.create({**resource, "service.instance.id": socket.gethostname()}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            RateLimitedErrorLog(exporter, url, time.monotonic),
            max_queue_size=_MAX_QUEUED_SPANS,
            schedule_delay_millis=_PERIOD_MS,
        )
    )
    return provider


def close(provider: TracerProvider) -> None:
    """Export the remaining spans, for two seconds at most."""
    # In a daemon thread, so that the process exits without waiting for it: with an unreachable collector the
    # shutdown takes half a minute.
    closing = threading.Thread(target=provider.shutdown, name="tracing", daemon=True)
    closing.start()
    closing.join(_CLOSE_SECONDS)


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
