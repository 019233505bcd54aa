"""Fallbacks of a route: which is tried where no replica answers, and how the answer reports it."""

import hashlib
import json

import httpx
import pytest

from tests.gateway.conftest import slice_of
from tests.gateway.kube_stub import endpoint_slice, llm_object
from tests.gateway.test_faults import BROKEN, REFUSED, answer_of
from tests.gateway.test_relay import CHAT, text_of
from tests.server.launch import NO_TLS

BODY = {**CHAT, "model": "chat"}
PATHS = {
    "/v1/chat/completions": BODY,
    "/v1/completions": {"model": "chat", "prompt": "Once", "max_tokens": 4},
}
SORRY = 'Please ask again "later".'


@pytest.fixture
def routed(start, engines, proxy, kube):
    """A gateway with a route to a replica behind the proxy, and these fallbacks."""

    def routed(*fallbacks, **spec):
        small = {"model": {"servedName": "tiny"}}
        kube.put(llm_object("LLMDeployment", "small", small))
        kube.put(endpoint_slice("small", {"small": "127.0.0.1"}, model="small", port=engines[1].port))
        rules = [{"targets": [{"deployment": "tiny"}]}]
        spec = {"models": ["chat"], "rules": rules, "fallbacks": list(fallbacks), **spec}
        kube.put(llm_object("LLMRoute", "r", spec))
        return start(slice_of("one", engines[0], proxy.port), WHOLE_ANSWER_SECONDS=5)

    return routed


def gone(proxy):
    proxy.refuse = True


def full(proxy):
    proxy.answer = answer_of(b"503 Service Unavailable", REFUSED)


def broken(proxy):
    proxy.answer = answer_of(b"503 Service Unavailable", BROKEN)


def hanging(proxy):
    proxy.hang = True


@pytest.mark.parametrize("fault", [gone, full, broken, hanging])
@pytest.mark.parametrize("stream", [False, True])
def test_another_model_answers_whatever_the_first_one_lacks_and_the_client_is_told(
    routed, engines, proxy, fault, stream
):
    gateway = routed({"deployment": "small"}, reliability={"firstByteTimeoutSeconds": 5})
    healthy = engines[1].post("/v1/chat/completions", {**BODY, "model": "tiny", "stream": stream})
    fault(proxy)
    answer = gateway.post("/v1/chat/completions", {**BODY, "stream": stream})
    assert (answer.status_code, answer.headers["x-quire-degraded"]) == (200, "deployment=small")
    assert text_of(answer.text) == text_of(healthy.text) != ""
    line = gateway.wait_requests(1)[-1]
    assert (line["replicas"], line["deployment"]) == (["one", "small"], "small")
    assert gateway.metric("gateway_fallbacks_total", model="chat", step="deployment=small") == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_canned_answer_reads_as_any_other(routed, proxy, path, stream):
    gateway = routed({"canned": SORRY})
    proxy.refuse = True
    answer = gateway.post(path, {**PATHS[path], "stream": stream})
    assert (answer.status_code, answer.headers["x-quire-degraded"]) == (200, "canned")
    assert text_of(answer.text) == SORRY
    with gateway.client() as client:
        body = {**PATHS[path], "stream": stream}
        create = client.chat.completions.create if "chat" in path else client.completions.create
        parsed = create(**body)
        last = list(parsed)[-1] if stream else parsed
        assert last.choices[0].finish_reason == "stop"


def test_a_canned_stream_ends_with_its_usage_where_that_is_asked_for(routed, proxy):
    gateway = routed({"canned": SORRY})
    proxy.refuse = True
    with gateway.client() as client:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = client.chat.completions.create(**BODY, **options)
    assert (last.choices, last.usage.total_tokens) == ([], 0)


def test_an_answer_of_the_target_says_nothing_of_a_fallback(routed):
    answer = routed({"canned": SORRY}).post("/v1/chat/completions", BODY)
    assert (answer.status_code, answer.headers.get("x-quire-degraded")) == (200, None)


def test_a_target_without_any_replica_falls_back_as_well(routed):
    nowhere = {"rules": [{"targets": [{"deployment": "nowhere"}]}]}
    gateway = routed({"canned": SORRY}, **nowhere)
    assert gateway.post("/v1/chat/completions", BODY).headers["x-quire-degraded"] == "canned"
    gateway.kube.put(llm_object("LLMRoute", "r", {"models": ["chat"], **nowhere}))
    gateway.wait("no fallback", lambda: gateway.post("/v1/chat/completions", BODY).status_code == 503)
    assert gateway.post("/v1/chat/completions", BODY).json()["error"]["code"] == "no_replica"


def test_half_of_the_tokens_are_asked_for_after_a_failure_and_not_of_a_request_without_a_limit(routed, proxy):
    gateway = routed({"halveMaxTokens": True})
    full(proxy)
    answer = gateway.post("/v1/chat/completions", BODY)
    assert (answer.status_code, answer.content) == (503, REFUSED)
    assert "x-quire-degraded" not in answer.headers, "what failed was what was asked for"
    bodies = [json.loads(one.partition(b"\r\n\r\n")[2]) for one in proxy.requests]
    assert [body["max_tokens"] for body in bodies] == [20, 10]
    endless = {name: value for name, value in BODY.items() if name != "max_tokens"}
    gateway.post("/v1/chat/completions", endless)
    assert len(proxy.requests) == 3


def test_steps_are_tried_in_their_order_until_one_answers(routed, proxy):
    gateway = routed({"halveMaxTokens": True}, {"deployment": "small"}, {"canned": SORRY})
    full(proxy)
    assert gateway.post("/v1/chat/completions", BODY).headers["x-quire-degraded"] == "deployment=small"
    assert gateway.wait_requests(1)[-1]["replicas"] == ["one", "one", "small"]


def test_a_request_that_is_wrong_is_refused_and_falls_back_nowhere(routed):
    gateway = routed({"canned": SORRY})
    answer = gateway.post("/v1/chat/completions", {**BODY, "temperature": -1})
    assert (answer.status_code, answer.headers.get("x-quire-degraded")) == (400, None)


POOR = {"authorization": "Bearer sk-poor"}


@pytest.fixture
def poor(kube):
    """A client whose budget has no room for an external backend."""
    prices = {"promptPerMillion": "1000", "completionPerMillion": "1000"}
    spec = {"baseURL": "https://api.example.com/v1", "model": "gpt", "prices": prices}
    kube.put(llm_object("LLMExternalBackend", "dear", spec))
    spec = {"keyHashes": [hashlib.sha256(b"sk-poor").hexdigest()], "budget": {"cost": "0.001"}}
    kube.put(llm_object("LLMClient", "poor", spec))


def ask_poor(gateway):
    return httpx.post(
        gateway.url + "/v1/chat/completions", json=BODY, headers=POOR, timeout=60, verify=NO_TLS
    )


@pytest.mark.parametrize(("fault", "kind"), [(full, "Overload"), (gone, "Unavailable")])
def test_a_step_that_the_budget_cannot_pay_changes_nothing_for_the_next_ones(
    routed, proxy, poor, fault, kind
):
    others = {"Overload": "Unavailable", "Unavailable": "Overload"}
    steps = {"canned": "no", "onlyOn": [others[kind]]}, {"canned": SORRY, "onlyOn": [kind]}
    gateway = routed({"external": "dear"}, *steps)
    fault(proxy)
    answer = ask_poor(gateway)
    assert (answer.status_code, text_of(answer.text)) == (200, SORRY)


def test_where_no_step_can_be_paid_the_answer_is_the_targets(routed, proxy, poor):
    gateway = routed({"external": "dear"})
    full(proxy)
    answer = ask_poor(gateway)
    assert (answer.status_code, answer.content) == (503, REFUSED)
    assert gateway.wait_requests(1)[-1]["replicas"] == ["one"], "nothing was sent out"


def test_what_becomes_of_a_fallback_changes_nothing_for_the_next_ones(routed, proxy):
    steps = {"canned": "no", "onlyOn": ["Unavailable"]}, {"canned": SORRY, "onlyOn": ["Overload"]}
    gateway = routed({"deployment": "nowhere"}, *steps)
    full(proxy)
    assert text_of(gateway.post("/v1/chat/completions", BODY).text) == SORRY


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_replica_says_of_its_answer_stands_beside_the_step_in_one_header(
    routed, proxy, engines, stream
):
    nowhere = {"rules": [{"targets": [{"deployment": "nowhere"}]}]}
    gateway = routed({"deployment": "tiny"}, **nowhere)
    body = b'data: {"choices": []}\n\ndata: [DONE]\n\n' if stream else b'{"choices": []}'
    answer = answer_of(b"200 OK\r\nx-quire-degraded: deadline", body)
    proxy.answer = answer.replace(b"application/json", b"text/event-stream") if stream else answer
    answer = gateway.post("/v1/chat/completions", {**BODY, "stream": stream})
    assert answer.status_code == 200
    assert answer.headers.get_list("x-quire-degraded") == ["deployment=tiny, deadline"]
