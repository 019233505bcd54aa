"""A stream whose replica is lost goes on at another one: no token is lost, comes twice, or is another one."""

import json
import re

import httpx
import pytest

from quire_gateway.openai.calls import CHAT as PATH
from quire_gateway.openai.calls import read
from quire_gateway.resumption import Resumption
from tests.gateway.conftest import slice_of
from tests.gateway.fault_proxy import FaultProxy
from tests.gateway.kube_stub import llm_object
from tests.gateway.test_relay import CHAT, text_of
from tests.server.launch import NO_TLS

EXACT = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1.5, "seed": 7}}
BODY = {
    **CHAT,
    "stream": True,
    "max_tokens": 60,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}
TWO_TOKENS = {**CHAT, "max_tokens": 2}


@pytest.fixture
def pair(start, engines, proxy):
    """A gateway before two replicas in turns, the first behind the proxy; what they answer without faults."""

    def pair(**fields):
        proxy.ends = True
        body = {**BODY, **fields}
        whole = engines[1].post(PATH, body)
        gateway = start(slice_of("one", engines[0], proxy.port))
        rules = [{"targets": [{"deployment": "tiny"}]}]
        spec = {"models": ["tiny"], "rules": rules, "routing": {"strategy": "RoundRobin"}}
        gateway.kube.put(llm_object("LLMRoute", "tiny", spec))
        gateway.wait("the route is there", lambda: gateway.post(PATH, TWO_TOKENS).status_code == 200)
        gateway.kube.put(slice_of("two", engines[1]))
        gateway.wait_replicas(2)
        return gateway, body, whole.text

    return pair


def ask_until(gateway, body, is_met):
    """Ask until a stream met the fault: one of two goes to the replica that fails. The answers."""
    answers = []
    while len(answers) < 4:
        answers.append(gateway.post(PATH, body))
        if is_met(answers[-1]):
            return answers
    raise AssertionError("no request met the fault")


def num_resumed(gateway):
    samples = re.findall(r'^gateway_resumed_streams_total\{model="tiny"\} (\S+)', metrics(gateway), re.M)
    return sum(map(float, samples))


def metrics(gateway):
    return httpx.get(gateway.url + "/metrics", verify=NO_TLS).text


def last_error(answer):
    return documents(answer.text)[-1].get("error", {}).get("code")


def documents(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if "{" in line]


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.parametrize("num_events", [1, 2, 9, 30])
def test_a_stream_goes_on_at_another_replica_where_its_own_was_cut(pair, proxy, case, num_events):
    gateway, body, whole = pair(**EXACT[case])
    proxy.cut_after = num_events
    for answer in ask_until(gateway, body, lambda answer: num_resumed(gateway)):
        assert answer.status_code == 200
        assert text_of(answer.text) == text_of(whole)
        events = documents(answer.text)
        assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1
        assert events[-1]["usage"]["completion_tokens"] == 60
        assert [choice["finish_reason"] for event in events for choice in event["choices"]].count(
            "length"
        ) == 1
        assert answer.text.endswith("data: [DONE]\n\n") and answer.text.count("[DONE]") == 1
        assert "\n:" not in answer.text, "comments are for the gateway"
    lines = [line for line in gateway.wait_requests(2) if line["replicas"] == ["one", "two"]]
    assert {(line["outcome"], line["completion_tokens"]) for line in lines} == {("success", 60)}
    assert num_resumed(gateway) == 1


def test_a_stream_goes_on_where_the_engine_says_that_it_failed(pair, proxy):
    gateway, body, whole = pair()
    opening = {"id": "chatcmpl-x", "created": 5, "choices": [{"delta": {"role": "assistant"}}]}
    failed = {"error": {"message": "", "type": "server_error", "code": "engine_unavailable"}}
    events = b"".join(
        b"data: " + json.dumps(one, separators=(",", ":")).encode() + b"\n\n" for one in (opening, failed)
    )
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
    proxy.answer = head % (len(events) + (2 << 20)) + events
    *_, answer = ask_until(gateway, body, lambda answer: num_resumed(gateway))
    assert text_of(answer.text) == text_of(whole)
    assert {event["id"] for event in documents(answer.text)} == {"chatcmpl-x"}
    assert "engine_unavailable" not in answer.text


def test_a_sampled_stream_without_a_seed_ends_with_an_error_event(pair, proxy):
    gateway, body, _ = pair(temperature=1)
    proxy.cut_after = 3
    ask_until(gateway, body, lambda answer: last_error(answer) == "replica_lost")
    assert num_resumed(gateway) == 0


def test_a_stream_that_no_other_replica_can_go_on_with_ends_with_an_error_event(start, engines, proxy):
    gateway = start(slice_of("one", engines[0], proxy.port))
    proxy.cut_after, proxy.ends = 3, True
    ask_until(gateway, BODY, lambda answer: last_error(answer) == "replica_lost")
    assert gateway.wait_requests(1)[-1]["outcome"] == "error"


def test_where_the_other_replica_does_not_go_on_the_stream_ends_with_an_error_event(pair, proxy, engines):
    gateway, body, _ = pair()
    gateway.kube.put(slice_of("two", engines[1], 1))
    proxy.cut_after = 3
    ask_until(
        gateway, body, lambda answer: answer.status_code == 200 and last_error(answer) == "replica_lost"
    )


@pytest.mark.deep
def test_what_is_no_stream_does_not_go_on_with_one(pair, proxy, engines):
    gateway, body, _ = pair()
    with FaultProxy(engines[1].port) as other:
        other.answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
        gateway.kube.put(slice_of("two", engines[1], other.port))
        gateway.wait("the other one is asked", lambda: gateway.post(PATH, body).text == "{}")
        proxy.cut_after = 3
        answers = ask_until(gateway, body, lambda answer: last_error(answer) == "replica_lost")
    assert answers[-1].text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0}, True),
        ({"seed": 3, "temperature": 2}, True),
        ({}, False),
        ({"temperature": False}, False),
        ({"temperature": 0, "n": 2}, False),
        ({"temperature": 0, "logprobs": True}, False),
        ({"temperature": 0, "logprobs": 0}, False),
        ({"temperature": 0, "logprobs": False}, True),
        ({"seed": 3, "prompt": ["a", "b"]}, False),
        ({"seed": 3, "prompt": [1, 2]}, True),
    ],
)
def test_what_every_replica_answers_alike_can_be_gone_on_with(fields, expected):
    assert read(PATH, json.dumps({"model": "m", **fields}).encode()).is_exact is expected


def event(document, tokens=""):
    return f"{tokens}data: {json.dumps(document, separators=(',', ':'))}\n\n".encode()


def test_only_comments_are_taken_out_whatever_a_text_says():
    hostile = ': tokens 9\ndata: {"error":{"type":"server_error"}}\n\n "finish_reason":"stop" data: [DONE]'
    first = event({"id": "a", "created": 1, "text": hostile, "finish_reason": None})
    stream = Resumption()
    assert stream.take(b": tokens 1,2\n" + first + b": tokens 3\n" + first) == (first + first, "")
    assert not stream.is_finished and not stream.is_done
    assert stream.resume == {"id": "a", "created": 1, "token_ids": [1, 2, 3]}


def test_a_replica_that_names_no_tokens_cannot_be_gone_on_from():
    stream = Resumption()
    stream.take(event({"id": "a", "created": 1}))
    assert stream.is_possible
    stream.take(event({"id": "a", "created": 1}))
    assert not stream.is_possible


def test_nothing_goes_on_after_a_part_of_an_event():
    stream = Resumption()
    whole = event({"id": "a", "created": 1}, tokens=": tokens 1\n")
    for part in (b"", whole, whole[:30], b": tokens of a text"):
        assert stream.is_possible
        passed, _ = stream.take(part)
        assert passed == (part if part != whole else whole.removeprefix(b": tokens 1\n"))
        if part not in (b"", whole):
            break
    assert not stream.is_possible
    assert stream.take(b": tokens of a text") == (b": tokens of a text", "")


@pytest.mark.parametrize("tokens", ["", "x", "1,", "-1", "9" * 5000])
def test_nothing_goes_on_after_tokens_that_are_none(tokens):
    stream = Resumption()
    whole = event({"id": "a", "created": 1})
    assert stream.take(f": tokens {tokens}\n".encode() + whole) == (whole, "")
    assert not stream.is_possible


@pytest.mark.parametrize(
    "head", [{"id": "a"}, {"id": "a", "created": 1e300}, {"id": "a", "created": "1"}, []]
)
def test_nothing_goes_on_after_an_answer_that_does_not_say_which_it_is(head):
    stream = Resumption()
    stream.take(event(head, tokens=": tokens 1\n"))
    assert not stream.is_possible
    waiting = Resumption()
    waiting.take(b": waiting\n\n")
    assert waiting.is_possible and waiting.resume is None, "nothing of the answer was sent"


@pytest.mark.parametrize("error", [{"type": "invalid_request_error", "code": None}, {"message": "no"}, "no"])
def test_an_error_that_is_of_the_request_is_the_clients(error):
    """And so is one that does not say whose it is."""
    refusal = event({"error": error})
    assert Resumption().take(refusal) == (refusal, "")
