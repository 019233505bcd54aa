"""Answers that are given again, and those that are not."""

import hashlib

import httpx
import pytest

from quire_gateway.openai.calls import CHAT as PATH
from quire_gateway.response_cache import MAX_ANSWER_BYTES, CachedAnswer, Recording, ResponseCache
from tests.gateway.conftest import slice_of
from tests.gateway.kube_stub import llm_object
from tests.gateway.test_relay import CHAT
from tests.server.launch import NO_TLS

ROUTE = {"models": ["chat"], "rules": [{"targets": [{"deployment": "tiny"}]}], "cache": {"ttlSeconds": 600}}
BODY = {**CHAT, "model": "chat"}
BIG = CachedAnswer((), b"x" * 9000)


@pytest.fixture
def gateway(start, engines, proxy, kube):
    kube.put(llm_object("LLMDeployment", "tiny", {}))
    kube.put(llm_object("LLMRoute", "r", ROUTE))
    for name in ("alice", "bob"):
        digest = hashlib.sha256(name.encode()).hexdigest()
        kube.put(llm_object("LLMClient", name, {"keyHashes": [digest], "budget": {"tokens": 10**6}}))
    return start(slice_of("one", engines[0], proxy.port))


def ask(gateway, client="alice", **fields):
    headers = {"authorization": f"Bearer {client}"}
    return httpx.post(gateway.url + PATH, json={**BODY, **fields}, headers=headers, timeout=60, verify=NO_TLS)


def is_hit(answer):
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-quire-cache") == "hit"


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"temperature": 1, "seed": 4}])
def test_the_same_request_of_the_same_client_gets_the_same_bytes_without_a_replica(gateway, proxy, fields):
    first, asked = ask(gateway, **fields), len(proxy.requests)
    again = ask(gateway, **fields)
    assert (is_hit(first), is_hit(again)) == (False, True)
    assert again.content == first.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert len(proxy.requests) == asked
    line = gateway.wait_requests(2)[-1]
    assert (line["replicas"], line["prompt_tokens"], line["outcome"]) == ([], 0, "success")
    assert gateway.metric("gateway_response_cache_hits_total", model="chat") == 1


def test_what_differs_in_client_or_bytes_or_may_be_drawn_anew_is_asked_for_again(gateway):
    ask(gateway)
    assert not is_hit(ask(gateway, "bob")), "no client gets what another one has asked for"
    assert not is_hit(ask(gateway, max_tokens=19))
    assert [is_hit(ask(gateway, temperature=1)) for _ in range(2)] == [False, False]


def test_a_changed_deployment_answers_anew(gateway):
    ask(gateway)
    gateway.kube.put(llm_object("LLMDeployment", "tiny", {"model": {"aliases": ["a"]}}, generation=2))
    gateway.wait("the change is known", lambda: not is_hit(ask(gateway)))


def test_errors_and_cut_streams_are_not_given_again(gateway, proxy):
    assert ask(gateway, temperature=-1).status_code == 400
    assert "x-quire-cache" not in ask(gateway, temperature=-1).headers
    proxy.cut_after, proxy.ends = 2, True
    assert "replica_lost" in ask(gateway, stream=True).text
    proxy.cut_after = None
    assert not is_hit(ask(gateway, stream=True))


def test_an_answer_is_kept_for_its_time(clock):
    cache = ResponseCache(clock)
    cache.put(b"a", BIG, 10)
    clock.now += 9.9
    assert cache.get(b"a") is BIG
    clock.now += 0.2
    assert (cache.get(b"a"), cache.num_bytes) == (None, 0)


def test_the_ones_used_longest_ago_go_first_and_no_more_is_kept_than_allowed(clock):
    cache = ResponseCache(clock, max_bytes=50_000)
    for number in range(100):
        cache.put(b"%d" % number, BIG, 600)
        assert cache.get(b"0") is BIG
        assert cache.num_bytes <= 50_000
    assert cache.get(b"1") is None and cache.get(b"99") is BIG
    cache.put(b"0", CachedAnswer((), b""), 600)
    assert cache.num_bytes < 50_000


def test_a_long_answer_is_not_recorded():
    recording = Recording(b"k")
    recording.begin(200, ())
    for _ in range(3):
        recording.add(b"x" * (MAX_ANSWER_BYTES // 2))
    recording.is_whole = True
    assert recording.answer is None and recording.parts == []
