"""Anthropic's Messages through the gateway: relayed, counted, and in their form where no replica answers."""

import hashlib
import json

import httpx
import pytest

from tests.gateway.conftest import slice_of
from tests.gateway.kube_stub import llm_object
from tests.server.launch import NO_TLS

BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "max_tokens": 20,
    "temperature": 0,
    "ignore_eos": True,
}
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
COUNTED = {name: BODY[name] for name in ("model", "messages")}
SORRY = 'Please ask again "later".'
KEY = "sk-alice"


def events(answer):
    """The data of each event, which agrees with its name."""
    found = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def text_of(found):
    return "".join(one["delta"]["text"] for one in found if one["type"] == "content_block_delta")


def post(gateway, path, body, key=KEY):
    return httpx.post(gateway.url + path, json=body, headers={"x-api-key": key}, timeout=60, verify=NO_TLS)


@pytest.fixture
def routed(start, engines, proxy, kube):
    """A gateway with a client and a route to a replica behind the proxy, with a text as its fallback."""
    rules = [{"targets": [{"deployment": "tiny"}]}]
    spec = {"models": ["chat"], "rules": rules, "fallbacks": [{"canned": SORRY}]}
    kube.put(llm_object("LLMRoute", "r", spec))
    hashes = [hashlib.sha256(KEY.encode()).hexdigest()]
    limits = {"tokensPerMinute": 100_000}
    kube.put(llm_object("LLMClient", "alice", {"keyHashes": hashes, "limits": limits}))
    return start(slice_of("one", engines[0], proxy.port))


def test_answers_and_counts_are_the_engines_own_and_their_tokens_are_counted(shared, engines):
    before = len(shared.requests())
    whole = shared.post(PATH, BODY)
    direct = engines[0].post(PATH, BODY).json()
    assert whole.json()["content"] == direct["content"]
    assert whole.json()["usage"]["output_tokens"] == 20
    found = events(shared.post(PATH, {**BODY, "stream": True}))
    assert text_of(found) == direct["content"][0]["text"]
    assert (found[0]["type"], found[-1]) == ("message_start", {"type": "message_stop"})
    counted = shared.post(COUNT, COUNTED).json()
    first, second, third = shared.wait_requests(3, before)
    assert first["prompt_tokens"] == second["prompt_tokens"] == counted["input_tokens"]
    assert first["completion_tokens"] == second["completion_tokens"] == 20
    assert (third["path"], third["completion_tokens"], third["outcome"]) == (COUNT, 0, "success")


def test_what_is_refused_is_in_anthropic_s_form(shared):
    for body, status, kind in (
        ({**BODY, "model": "other"}, 404, "not_found_error"),
        ({**BODY, "temperature": -1}, 400, "invalid_request_error"),
        ({**BODY, "messages": []}, 400, "invalid_request_error"),
    ):
        answer = shared.post(PATH, body)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert answer.json()["error"]["type"] == kind
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert httpx.get(shared.url + PATH, verify=NO_TLS).status_code == 405


def test_a_key_is_taken_as_anthropic_s_clients_send_it_and_counting_takes_no_tokens(routed):
    refused = post(routed, PATH, {**BODY, "model": "chat"}, "sk-other")
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    counted = post(routed, COUNT, {**COUNTED, "model": "chat"})
    assert counted.json()["input_tokens"] > 0
    answer = post(routed, PATH, {**BODY, "model": "chat", "thinking": {"type": "adaptive"}})
    assert answer.headers["x-quire-ignored"] == "thinking"
    left = [int(one.headers["x-ratelimit-remaining-tokens"]) for one in (counted, answer)]
    assert left[0] == 100_000 > left[1]
    assert routed.wait_requests(3)[-1]["client"] == "models/alice"


def test_a_stream_that_is_cut_ends_with_an_error_event_of_its_own(routed, proxy):
    proxy.cut_after = 3
    found = events(post(routed, PATH, {**BODY, "model": "chat", "stream": True}))
    assert [one["type"] for one in (found[0], found[-1])] == ["message_start", "error"]
    assert found[-1]["error"]["code"] == "replica_lost"
    assert routed.wait_requests(1)[-1]["outcome"] == "error"


def test_a_text_of_the_route_reads_as_any_other_answer(routed, proxy):
    proxy.refuse = True
    body = {**BODY, "model": "chat"}
    answer = post(routed, PATH, body)
    assert (answer.status_code, answer.headers["x-quire-degraded"]) == (200, "canned")
    assert answer.json()["content"] == [{"type": "text", "text": SORRY}]
    found = events(post(routed, PATH, {**body, "stream": True}))
    assert text_of(found) == SORRY and found[-1] == {"type": "message_stop"}
    assert found[-2]["delta"]["stop_reason"] == answer.json()["stop_reason"] == "end_turn"
    assert post(routed, COUNT, {**COUNTED, "model": "chat"}).json() == {"input_tokens": 0}


def test_an_external_backend_is_not_asked_for_messages_and_the_error_says_so(gateway_for, external):
    gateway = gateway_for(targets=[{"external": "outside"}])
    answer = gateway.post(PATH, {**BODY, "model": "chat"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "api_not_supported")
    assert "/v1/chat/completions" in answer.json()["error"]["message"] and not external.requests
