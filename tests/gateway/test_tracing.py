"""The spans of a gateway and of its engines are one tree, from a client's context to the engine's work."""

import re
import secrets
import signal

import httpx
import pytest

from e2e.ports import free_port
from tests.gateway.conftest import LOOPBACK, num_held, outside_alone, slice_of, wake
from tests.gateway.kube_stub import llm_object
from tests.gateway.test_relay import CHAT
from tests.server.launch import NO_TLS
from tests.server.otlp import attributes

PATH = "/v1/chat/completions"
KEY = "sk-client"
SECRET = "xylophone"
BODY = {**CHAT, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "ignore_eos": True}
STREAM = {**BODY, "stream": True, "temperature": 1}  # that no other replica can go on with
ERROR = "STATUS_CODE_ERROR"


@pytest.fixture
def traced(start, kube, engines, proxy, spans):
    """A gateway that exports its spans, before a replica behind the proxy, and a second one in turns."""

    def traced(*, num_replicas=2, reliability=None, **environ):
        slices = slice_of("one", engines[0], proxy.port), slice_of("two", engines[1])
        rules = [{"targets": [{"deployment": "tiny"}]}]
        spec = {"models": ["chat"], "rules": rules, "routing": {"strategy": "RoundRobin"}}
        spec |= {"reliability": reliability or {}}
        kube.put(llm_object("LLMRoute", "r", spec))
        environ = {"OTLP_ENDPOINT": spans.url, **environ}
        return start(*slices[:num_replicas], **environ)

    return traced


def ask(gateway, body=BODY, *, sampled=True, model="chat"):
    """The answer, the trace's id and the client's span's id."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    headers = {
        "traceparent": f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}",
        "authorization": f"Bearer {KEY}",
    }
    answer = httpx.post(
        gateway.url + PATH, json={**body, "model": model}, headers=headers, timeout=60, verify=NO_TLS
    )
    return answer, trace_id, span_id


def ask_until_retried(gateway, body=BODY):
    """As `ask`, of a request whose first attempt failed: one of two goes to the replica behind the proxy."""
    for number in range(1, 5):
        found = ask(gateway, body)
        if len(gateway.wait_requests(number)[-1]["replicas"]) == 2:
            return found
    raise AssertionError("no request met the fault")


def of_gateway(found):
    """The gateway's own span, and those of its attempts in their order."""
    attempts = [one for one in found if one["kind"] == "SPAN_KIND_CLIENT"]
    servers = {one["spanId"]: one for one in found if one["kind"] == "SPAN_KIND_SERVER"}
    (parent,) = {one["parentSpanId"] for one in attempts}
    return servers[parent], sorted(attempts, key=lambda one: int(one["startTimeUnixNano"]))


def children(found, span):
    return [one for one in found if one.get("parentSpanId") == span["spanId"]]


def status_of(span):
    return span.get("status", {}).get("code")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stream", [True, False])
def test_the_spans_of_a_client_the_gateway_and_the_engine_are_one_tree(traced, spans, stream):
    gateway = traced(num_replicas=1)
    answer, trace_id, span_id = ask(gateway, {**BODY, "stream": stream})
    assert answer.status_code == 200
    found = spans.all_of_trace(trace_id, 6)
    request, (attempt,) = of_gateway(found)
    (engine,) = children(found, attempt)
    assert request["parentSpanId"] == span_id
    assert engine["kind"] == "SPAN_KIND_SERVER"
    assert {one["name"] for one in children(found, engine)} == {"queue", "prefill", "decode"}
    assert [one["name"] for one in (request, attempt, engine)] == ["chat chat", "chat tiny", "chat tiny"]
    assert [status_of(one) for one in (request, attempt)] == [None, None]
    said, tried, computed = map(attributes, (request, attempt, engine))
    line = gateway.wait_requests(1)[-1]
    assert said["gen_ai.request.model"] == "chat" and said["quire.route"] == "models/r"
    assert said["gen_ai.request.stream"] is stream and said["gen_ai.request.max_tokens"] == 4
    assert said["quire.status"] == tried["quire.status"] == "success"
    assert said["http.response.status_code"] == tried["http.response.status_code"] == 200
    assert said["quire.request.id"] == computed["quire.request.id"] == answer.headers["x-request-id"]
    assert said["gen_ai.usage.output_tokens"] == computed["gen_ai.usage.output_tokens"] == 4
    assert said["gen_ai.usage.input_tokens"] == line["prompt_tokens"]
    assert said["gen_ai.latency.time_to_first_token"] > 0
    assert tried["quire.replica"] == "one" and tried["quire.deployment"] == "models/tiny"
    assert tried["server.address"] == "127.0.0.1" and "http.request.resend_count" not in tried
    assert (line["trace_id"], line["span_id"]) == (trace_id, request["spanId"])


def test_a_request_without_a_context_begins_a_trace_that_the_engine_joins(traced, spans):
    gateway = traced(num_replicas=1)
    headers = {"traceparent": "00-1", "tracestate": "other=state"}
    assert (
        httpx.post(gateway.url + PATH, json=BODY, headers=headers, timeout=60, verify=NO_TLS).status_code
        == 200
    )
    found = spans.all_of_trace(gateway.wait_requests(1)[-1]["trace_id"], 6)
    request, (attempt,) = of_gateway(found)
    assert not request.get("parentSpanId") and len(children(found, attempt)) == 1


def test_an_attempt_that_failed_is_a_span_with_an_error_and_the_next_one_says_why_it_is(traced, spans, proxy):
    gateway = traced()
    proxy.refuse = True
    answer, trace_id, _ = ask_until_retried(gateway)
    assert answer.status_code == 200
    found = spans.all_of_trace(trace_id, 7)
    request, (first, second) = of_gateway(found)
    failed, tried = attributes(first), attributes(second)
    assert status_of(first) == ERROR and children(found, first) == []
    assert failed["error.type"] == failed["quire.status"] == tried["quire.retry.reason"]
    assert failed["error.type"] in ("connect", "reset")
    assert (failed["quire.replica"], tried["quire.replica"]) == ("one", "two")
    assert tried["http.request.resend_count"] == 1 and tried["quire.status"] == "success"
    assert [status_of(one) for one in (request, second)] == [None, None]
    assert len(children(found, second)) == 1


def test_a_stream_that_is_cut_marks_its_request_and_its_attempt(traced, spans, proxy):
    gateway = traced(num_replicas=1)
    proxy.cut_after = 2
    answer, trace_id, _ = ask(gateway, {**STREAM, "max_tokens": 40})
    assert answer.status_code == 200 and "replica_lost" in answer.text
    request, (attempt,) = of_gateway(spans.all_of_trace(trace_id, 6))
    assert status_of(request) == status_of(attempt) == ERROR
    assert attributes(request)["error.type"] == attributes(attempt)["error.type"] == "cut"
    assert attributes(request)["quire.status"] == "error"
    assert attributes(request)["http.response.status_code"] == 200


def test_a_stream_that_goes_on_elsewhere_has_two_attempts_and_no_error_of_its_own(traced, spans, proxy):
    gateway = traced()
    proxy.ends, proxy.cut_after = True, 2
    answer, trace_id, _ = ask_until_retried(gateway, {**STREAM, "temperature": 0, "max_tokens": 40})
    assert answer.text.endswith("data: [DONE]\n\n")
    request, (first, second) = of_gateway(spans.all_of_trace(trace_id, 11))
    assert (status_of(request), status_of(first), status_of(second)) == (None, ERROR, None)
    assert attributes(second)["quire.resumed"] is True


def test_an_attempt_that_another_one_was_faster_than_is_a_span_without_an_error(traced, spans, proxy):
    gateway = traced(reliability={"hedgeAfterMilliseconds": 200})
    proxy.hang = True
    answer, trace_id, _ = ask_until_retried(gateway, STREAM)
    assert answer.status_code == 200
    found = spans.all_of_trace(trace_id, 7)
    _, (first, second) = of_gateway(found)
    assert attributes(first)["quire.status"] == "cancelled" and status_of(first) is None
    assert attributes(second)["quire.status"] == "success"
    assert attributes(second)["quire.retry.reason"] == "hedge"


def test_a_request_that_is_wrong_is_a_span_without_an_attempt_and_without_an_error(traced, spans):
    answer, trace_id, _ = ask(traced(num_replicas=1), model="unknown")
    assert answer.status_code == 404
    (request,) = spans.all_of_trace(trace_id, 1)
    assert request["name"] == f"POST {PATH}" and status_of(request) is None
    assert attributes(request)["quire.status"] == "client_error"


def test_the_client_decides_whether_its_trace_is_exported_and_a_share_of_the_others_is(traced, spans):
    gateway = traced(num_replicas=1, TRACE_SAMPLE_RATIO=0)
    _, silent, _ = ask(gateway, sampled=False)
    assert httpx.post(gateway.url + PATH, json=BODY, timeout=60, verify=NO_TLS).status_code == 200
    _, loud, _ = ask(gateway)
    spans.all_of_trace(loud, 6)
    lines = gateway.wait_requests(3)
    assert not {silent, lines[1]["trace_id"]} & {one["traceId"] for one in spans.received}
    assert lines[0]["trace_id"] == silent


def test_spans_have_no_text_of_prompts_and_no_key(traced, spans):
    gateway = traced(num_replicas=1)
    for body in (BODY, STREAM, {**BODY, "stop": [SECRET]}, {**BODY, "messages": SECRET}):
        _, trace_id, _ = ask(gateway, body)
        spans.all_of_trace(trace_id, 2)
    assert b"quire-gateway" in spans.raw
    assert SECRET.encode() not in spans.raw and KEY.encode() not in spans.raw


def test_without_a_collector_the_client_s_context_goes_to_the_replica_as_it_is(traced, proxy):
    gateway = traced(num_replicas=1, OTLP_ENDPOINT="")
    _, trace_id, span_id = ask(gateway)
    assert f"00-{trace_id}-{span_id}-01".encode() in b"".join(proxy.requests)
    assert "trace_id" not in gateway.wait_requests(1)[-1]


def test_an_external_backend_gets_no_context_and_its_attempt_is_a_span_all_the_same(
    gateway_for, external, spans
):
    gateway = gateway_for(**outside_alone(environ={**LOOPBACK, "OTLP_ENDPOINT": spans.url}))
    answer, trace_id, _ = ask(gateway)
    assert answer.status_code == 200
    request, (attempt,) = of_gateway(spans.all_of_trace(trace_id, 2))
    assert attributes(attempt)["quire.deployment"] == "models/external/outside"
    assert attributes(attempt)["gen_ai.request.model"] == "gpt-4o-mini"
    assert status_of(request) is None
    assert not {"traceparent", "tracestate"} & external.requests[-1].headers.keys()
    assert b"sk-outside" not in spans.raw


def test_the_time_for_which_a_request_was_held_is_in_its_span(asleep, background, engines, spans):
    gateway = asleep(environ={"OTLP_ENDPOINT": spans.url})
    asked = background(ask, gateway, model="tiny")
    gateway.wait("it waits", lambda: num_held(gateway) == 1)
    wake(gateway, engines[0])
    answer, trace_id, _ = asked.result(60)
    assert answer.status_code == 200
    request, _ = of_gateway(spans.all_of_trace(trace_id, 6))
    waited = attributes(request)["quire.hold.seconds"]
    assert 0 < waited <= gateway.wait_requests(1)[-1]["seconds"]


def test_an_unreachable_collector_logs_one_line_and_fails_no_request(traced):
    gateway = traced(num_replicas=1, OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    assert all(ask(gateway)[0].status_code == 200 for _ in range(3))
    gateway.wait("a complaint", lambda: "takes no spans" in gateway.log.read_text())
    assert ask(gateway)[0].status_code == 200
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.wait_end() == 0
    log = gateway.log.read_text()
    assert len(re.findall("takes no spans", log)) == 1 and "Traceback" not in log
