"""One trace for each request: from the client's context, through the engine's stamps, to a collector and into
the log. The receiver is the test's own; tests/cluster/test_tracing.py has a real collector in between.
"""

import json
import secrets
import signal
import time

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from e2e.ports import free_port
from tests.server.launch import NO_TLS, Server
from tests.server.otlp import Spans, attributes

SECRET = "xylophone"
ASK = {
    "model": "tiny",
    "messages": [{"role": "user", "content": SECRET}],
    "max_tokens": 6,
    "ignore_eos": True,
}
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


@pytest.fixture(scope="module")
def spans():
    with Spans() as spans:
        yield spans


@pytest.fixture(scope="module")
def traced(tiny, tmp_path_factory, spans):
    flags = ("--otlp-endpoint", spans.url, "--trace-sample-ratio", "0")  # only what clients sample
    with Server(tiny, tmp_path_factory.mktemp("traced"), *flags) as server:
        yield server.wait_ready()


def ask(server, sampled=True, path="/v1/chat/completions", headers=None, **fields):
    """The answer, the trace's id and the client's span's id."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    traceparent = f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}"
    answer = httpx.post(
        server.url + path,
        json=ASK | fields,
        headers={"traceparent": traceparent, **(headers or {})},
        timeout=60,
        verify=NO_TLS,
    )
    return answer, trace_id, span_id


def test_a_request_is_a_span_with_children_for_queue_prefill_and_decode(traced, spans):
    answer, trace_id, span_id = ask(traced, temperature=0.5, seed=7)
    found = spans.of_trace(trace_id, 4)
    request = found.pop("chat tiny")
    assert request["parentSpanId"] == span_id
    assert set(found) == {"queue", "prefill", "decode"}
    assert all(child["parentSpanId"] == request["spanId"] for child in found.values())
    stages = [request["startTimeUnixNano"]]
    for name in ("queue", "prefill", "decode"):
        stages += [found[name]["startTimeUnixNano"], found[name]["endTimeUnixNano"]]
    stages = [int(stage) for stage in (*stages, request["endTimeUnixNano"])]
    assert stages == sorted(stages), "a part of the request lies outside of it, or before what precedes it"
    assert abs(time.time_ns() - stages[0]) < 120e9, "that is not the wall clock"
    recorded, usage = attributes(request), answer.json()["usage"]
    assert recorded["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert recorded["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 6
    assert recorded["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert recorded["gen_ai.response.finish_reasons"] == ["length"]
    assert recorded["gen_ai.request.temperature"] == 0.5 and recorded["gen_ai.request.seed"] == 7
    assert recorded["quire.preemptions"] == 0
    assert recorded["quire.request.id"] == answer.headers["x-request-id"]
    assert recorded["gen_ai.response.id"].endswith(answer.json()["id"].removeprefix("chatcmpl-"))
    assert "status" not in request or request["status"].get("code") in (None, "STATUS_CODE_UNSET")


def test_each_of_n_answers_has_its_own_decode_span(traced, spans):
    _, trace_id, _ = ask(traced, n=2)
    spans.of_trace(trace_id, 7)
    parts = [span for span in spans.received if span["traceId"] == trace_id and span["name"] == "decode"]
    assert sorted(attributes(part)["quire.choice.index"] for part in parts) == [0, 1]


def test_an_answer_that_ends_at_a_stop_string_has_spans_and_decode_time(traced, spans):
    text = ask(traced, temperature=0)[0].json()["choices"][0]["message"]["content"]
    before = traced.metric("vllm:request_decode_time_seconds_count")
    _, trace_id, _ = ask(traced, temperature=0, stop=[text[2:4]])
    assert attributes(spans.of_trace(trace_id, 4)["chat tiny"])["gen_ai.response.finish_reasons"] == ["stop"]
    assert traced.metric("vllm:request_decode_time_seconds_count") == before + 1


def test_unsampled_traces_are_not_exported(traced, spans):
    _, silent, _ = ask(traced, sampled=False)
    _, loud, _ = ask(traced)
    spans.of_trace(loud, 4)
    assert silent not in {span["traceId"] for span in spans.received}


def test_a_refused_request_is_a_span_with_its_http_status_and_no_error(traced, spans):
    answer, trace_id, _ = ask(traced, model="unknown")
    assert answer.status_code == 404
    request = spans.of_trace(trace_id, 1)["POST /v1/chat/completions"]
    assert attributes(request)["http.response.status_code"] == 404
    assert request.get("status", {}).get("code") != "STATUS_CODE_ERROR"


def test_request_log_lines_contain_the_trace_id_and_span_id(traced):
    answer, trace_id, span_id = ask(traced)
    line = traced.wait("its line", lambda: line_of(traced, answer.headers["x-request-id"]))
    assert line["trace_id"] == trace_id
    assert line["span_id"] != span_id and len(line["span_id"]) == 16


def test_without_tracing_the_client_s_trace_id_is_still_logged(server):
    headers = {"authorization": "Bearer alice-s-key"}
    answer, trace_id, _ = ask(server, headers=headers)
    assert answer.status_code == 200
    line = server.wait("its line", lambda: line_of(server, answer.headers["x-request-id"]))
    assert line["trace_id"] == trace_id


def line_of(server, request_id):
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if '"request"' in line]
    return next((line for line in lines if line.get("request_id") == request_id), None)


def test_spans_and_logs_contain_no_prompt_text(traced, spans):
    for fields in ({}, {"stop": [SECRET]}, {"user": "x", "temperature": -1}, {"response_format": SECRET}):
        _, trace_id, _ = ask(traced, **fields)
        spans.of_trace(trace_id, 1)
    ask(traced, path="/v1/completions", prompt=SECRET)
    httpx.post(traced.url + "/v1/completions", content=f'{{"prompt": "{SECRET}')
    httpx.post(traced.url + "/tokenize", json={"prompt": SECRET})
    assert SECRET.encode() not in spans.raw
    assert SECRET not in traced.log.read_text()


def test_latency_histograms_have_exemplars_with_the_trace_id(traced, spans):
    _, trace_id, _ = ask(traced)
    answer = httpx.get(traced.url + "/metrics", headers=OPENMETRICS)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    exemplars = {
        family.name: {sample.exemplar.labels["trace_id"] for sample in family.samples if sample.exemplar}
        for family in text_string_to_metric_families(answer.text)
    }
    assert trace_id in exemplars["llm_ttft_seconds"]
    assert trace_id in exemplars["llm_request_latency_seconds"]
    assert trace_id in exemplars["vllm:request_queue_time_seconds"]
    plain = httpx.get(traced.url + "/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert trace_id not in plain.text


@pytest.mark.deep
def test_an_unreachable_collector_logs_one_line_and_fails_no_request(tiny, tmp_path):
    flags = ("--otlp-endpoint", f"http://127.0.0.1:{free_port()}")
    with Server(tiny, tmp_path, *flags) as server:
        server.wait_ready()
        assert all(ask(server)[0].status_code == 200 for _ in range(3))
        server.wait("a complaint", lambda: "takes no spans" in server.log.read_text())
        assert ask(server)[0].status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert server.log.read_text().count("takes no spans") == 1
        assert "Traceback" not in server.log.read_text()
