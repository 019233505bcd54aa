"""Spans on their way in production: from the server to an OpenTelemetry collector, and on from it."""

import contextlib
import secrets
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from e2e.cluster import programs
from e2e.ports import free_port
from tests.server import tiny_model
from tests.server.launch import Server
from tests.server.otlp import Spans, attributes

pytestmark = pytest.mark.api

BIN_DIR = Path(__file__).parents[2] / ".cluster" / "bin"
CONFIG = """
receivers: {{otlp: {{protocols: {{http: {{endpoint: "127.0.0.1:{port}"}}}}}}}}
exporters: {{otlphttp: {{endpoint: "{url}", encoding: json, compression: none}}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{traces: {{receivers: [otlp], exporters: [otlphttp]}}}}
"""
SECRET = "xylophone"


@contextlib.contextmanager
def collector(directory, spans):
    """Its address; what it takes goes on to `spans`."""
    programs.build(BIN_DIR, ("otelcol",))
    port = free_port()
    config, said = directory / "otelcol.yaml", directory / "otelcol.log"
    config.write_text(CONFIG.format(port=port, url=spans.url))
    with said.open("wb") as log:
        process = subprocess.Popen([BIN_DIR / "otelcol", f"--config={config}"], stdout=log, stderr=log)
    try:
        end = time.monotonic() + 20
        while "Everything is ready" not in said.read_text():
            assert process.poll() is None and time.monotonic() < end, said.read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.deep
def test_a_real_collector_takes_the_spans_and_passes_them_on_whole(tmp_path):
    tiny = tiny_model.write(tmp_path / "tiny")
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": 6, "ignore_eos": True}
    with (
        Spans() as spans,
        collector(tmp_path, spans) as endpoint,
        Server(tiny, tmp_path, "--otlp-endpoint", endpoint) as server,
    ):
        server.wait_ready()
        answer = httpx.post(
            server.url + "/v1/completions",
            json=body,
            headers={"traceparent": f"00-{trace_id}-{span_id}-01"},
            timeout=60,
        )
        found = spans.of_trace(trace_id, 4)
        root = found.pop("text_completion tiny")
        assert root["parentSpanId"] == span_id
        assert {name: one["parentSpanId"] for name, one in found.items()} == dict.fromkeys(
            ("queue", "prefill", "decode"), root["spanId"]
        )
        assert (
            attributes(root)["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"] == 6
        )
        assert SECRET.encode() not in spans.raw
