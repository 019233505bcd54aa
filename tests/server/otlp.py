"""A small HTTP server that receives OTLP traces, from our servers or from a collector."""

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from e2e.http_server import HttpServer


class Spans:
    """Listens on a port of its own; `received` are all spans as OTLP's JSON has them."""

    def __init__(self):
        self.received = []
        self.raw = b""
        spans = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                spans.take(body, self.headers["content-type"])
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self._server = HttpServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._server.shutdown()
        self._server.server_close()

    def take(self, body, content_type):
        if content_type.startswith("application/json"):
            request = json.loads(body)
        else:
            request = MessageToDict(ExportTraceServiceRequest.FromString(body))
            for scope in scopes(request):
                for span in scope["spans"]:
                    for name in ("traceId", "spanId", "parentSpanId"):
                        span[name] = as_hex(span.get(name, ""))
        self.raw += body
        self.received += [span for scope in scopes(request) for span in scope["spans"]]

    def of_trace(self, trace_id, count, seconds=20.0):
        """The spans of one trace by name, once there are so many."""
        return {span["name"]: span for span in self.all_of_trace(trace_id, count, seconds)}

    def all_of_trace(self, trace_id, count, seconds=20.0):
        """The spans of one trace, once there are so many."""
        end = time.monotonic() + seconds
        while True:
            found = [span for span in self.received if span["traceId"] == trace_id]
            if len(found) >= count:
                return found
            assert time.monotonic() < end, f"{len(found)} of {count} spans of {trace_id}"
            time.sleep(0.02)


def scopes(request):
    return [scope for resource in request["resourceSpans"] for scope in resource["scopeSpans"]]


def as_hex(encoded):
    return base64.b64decode(encoded).hex()


def attributes(span):
    """Plain values by name."""
    return {one["key"]: plain(one["value"]) for one in span.get("attributes", [])}


def plain(value):
    ((kind, inner),) = value.items()
    if kind == "arrayValue":
        return [plain(item) for item in inner.get("values", [])]
    return int(inner) if kind == "intValue" else inner
