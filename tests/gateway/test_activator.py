"""Requests for a model without pods wait, have one started, and are answered by it."""

import contextlib
import hashlib
import json
import re
import socket
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import httpx
import pytest

from quire_gateway.relay import _send_as_event
from tests.gateway.conftest import SLEEPS, num_held, slice_of, wake
from tests.gateway.kube_stub import NAMESPACE, endpoint_slice, llm_object
from tests.gateway.test_faults import answer_of
from tests.gateway.test_relay import CHAT, text_of
from tests.server.launch import NO_TLS

LEASE = f"quire-demand-{NAMESPACE}.tiny"
DRAINING = b'{"error": {"message": "going", "type": "overloaded_error", "code": "draining"}}'


KEY = {"authorization": "Bearer sk-one"}


def client_of(tokens_per_minute):
    hashes = [hashlib.sha256(b"sk-one").hexdigest()]
    limits = {"tokensPerMinute": tokens_per_minute}
    return llm_object("LLMClient", "c", {"keyHashes": hashes, "limits": limits})


def name_of(lease):
    return lease.rpartition(".")[2]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_asks_for_a_pod_and_is_answered_by_it(asleep, engines, background, stream):
    gateway = asleep()
    asked = background(gateway.post, "/v1/chat/completions", {**CHAT, "stream": stream})
    gateway.wait("the operator is asked", lambda: LEASE in gateway.kube.objects.get("leases", {}))
    labels = gateway.kube.objects["leases"][LEASE]["metadata"]["labels"]
    assert (labels["serving.quire.dev/namespace"], labels["serving.quire.dev/name"]) == (NAMESPACE, "tiny")
    assert not asked.done()
    wake(gateway, engines[0])
    answer = asked.result(60)
    healthy = engines[0].post("/v1/chat/completions", {**CHAT, "stream": stream})
    assert answer.status_code == 200 and text_of(answer.text) == text_of(healthy.text) != ""
    assert gateway.metric("gateway_hold_duration_seconds_count", model="tiny", outcome="released") == 1
    gateway.wait("nothing is asked for any more", lambda: LEASE not in gateway.kube.objects["leases"])


@contextlib.contextmanager
def begun_to_wait(gateway, body):
    """A stream whose first comment has come; what follows it."""
    url = gateway.url + "/v1/chat/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=120, verify=NO_TLS) as answer:
        parts = answer.iter_text()
        yield next(parts), parts


def test_a_stream_gets_comments_with_the_time_that_is_left_while_it_waits(asleep, engines):
    gateway = asleep(status={"model": {"etaSeconds": 42}})
    with begun_to_wait(gateway, CHAT) as (first, parts):
        assert first == ": waiting: the model is started, about 42 s left\n\n"
        wake(gateway, engines[0])
        answer = "".join(parts)
    healthy = engines[0].post("/v1/chat/completions", {**CHAT, "stream": True})
    assert text_of(answer) == text_of(healthy.text)
    line = gateway.wait_requests(1)[0]
    assert (line["status"], line["outcome"]) == (200, "success")


def test_one_that_shares_an_accelerator_waits_for_its_turn_and_the_load(asleep, engines, background):
    turn = (datetime.now(UTC) + timedelta(seconds=100)).isoformat()
    sharing = {"pool": "card", "state": "Waiting", "awake": "other", "turnTime": turn}
    gateway = asleep(
        {"sharing": {"pool": "card"}}, status={"model": {"lastLoadSeconds": 40}, "sharing": sharing}
    )
    with begun_to_wait(gateway, CHAT) as (first, parts):
        left = re.fullmatch(r": waiting: the model is started, about (\d+) s left\n\n", first)
        assert left and 40 < int(left[1]) <= 140
        assert LEASE in gateway.kube.objects["leases"]
        wake(gateway, engines[0])
        answer = "".join(parts)
    healthy = engines[0].post("/v1/chat/completions", {**CHAT, "stream": True})
    assert text_of(answer) == text_of(healthy.text)


def test_one_whose_turn_does_not_come_in_time_is_refused_with_the_time_that_is_left(asleep):
    turn = (datetime.now(UTC) + timedelta(seconds=100)).isoformat()
    sharing = {"pool": "card", "state": "Waiting", "awake": "other", "turnTime": turn}
    gateway = asleep(
        {"sharing": {"pool": "card"}},
        status={"model": {"lastLoadSeconds": 40}, "sharing": sharing},
        hold={"maxSeconds": 1},
    )
    answer = gateway.post("/v1/chat/completions", CHAT)
    assert answer.status_code == 503 and 40 < int(answer.headers["retry-after"]) <= 140


def test_clients_read_a_stream_that_has_begun_with_a_comment(asleep, engines, background):
    gateway = asleep()
    with gateway.client() as client:
        asked = background(lambda: list(client.chat.completions.create(**CHAT, stream=True)))
        with begun_to_wait(gateway, CHAT) as (_, parts):
            wake(gateway, engines[0])
            "".join(parts)
        assert asked.result(60)[-1].choices[0].finish_reason == "length"


def test_an_error_of_the_pod_is_an_event_of_a_stream_that_has_begun_to_wait(asleep, engines):
    gateway = asleep()
    with begun_to_wait(gateway, {**CHAT, "temperature": 77}) as (_, parts):
        wake(gateway, engines[0])
        *_, event, end, _ = "".join(parts).split("\n\n")
    assert end == "data: [DONE]"
    assert json.loads(event.removeprefix("data: "))["error"]["param"] == "temperature"
    assert gateway.wait_requests(1)[0]["outcome"] == "client_error"


class Events:
    """A stream that has begun."""

    def __init__(self):
        self.sent = []

    async def error(self, error):
        self.sent.append(error)


async def test_so_is_one_that_is_a_page_of_a_proxy():
    exchange, statuses = Events(), []
    await _send_as_event(exchange, 400, b"<html>", SimpleNamespace(answer_begins=statuses.append))
    (error,) = exchange.sent
    assert (str(error), error.code) == ("The replica answered with HTTP 400.", "replica_error")
    assert statuses == [400]


def test_two_hundred_that_wait_are_all_answered_and_never_more_at_once_than_the_pod_runs(
    asleep, engines, background
):
    slots = 8
    gateway = asleep({**SLEEPS, "engine": {"maxNumSeqs": slots}})
    body = {**CHAT, "max_tokens": 4}
    asked = [
        background(gateway.post, "/v1/chat/completions", {**body, "stream": index % 2 == 0})
        for index in range(200)
    ]
    gateway.wait("all wait", lambda: num_held(gateway) == 200)
    wake(gateway, engines[0])
    most = 0
    while not all(one.done() for one in asked):
        running = engines[0].statusz()
        most = max(most, running["running"] + running["queued"])
    assert {one.result().status_code for one in asked} == {200}
    assert 0 < most <= slots


def test_requests_beyond_the_limit_are_refused_and_told_when_to_come_again(asleep, background, engines):
    gateway = asleep(hold={"maxRequests": 1}, status={"model": {"lastLoadSeconds": 33}})
    waits = background(gateway.post, "/v1/chat/completions", CHAT)
    gateway.wait("one waits", lambda: num_held(gateway) == 1)
    answer = gateway.post("/v1/chat/completions", CHAT)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "33")
    assert answer.json()["error"]["code"] == "hold_queue_full"
    wake(gateway, engines[0])
    assert waits.result(60).status_code == 200


def test_one_that_has_waited_long_enough_gets_a_503(asleep):
    gateway = asleep(hold={"maxSeconds": 1})
    answer = gateway.post("/v1/chat/completions", CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "hold_timeout")
    assert int(answer.headers["retry-after"]) > 0
    assert gateway.wait_requests(1)[0]["outcome"] == "shed"


def test_a_fallback_answers_where_a_request_is_not_to_wait_and_the_pod_is_started_all_the_same(asleep):
    gateway = asleep(hold={"maxSeconds": 0}, fallbacks=[{"canned": "One moment."}])
    answer = gateway.post("/v1/chat/completions", CHAT)
    assert (text_of(answer.text), answer.headers["x-quire-degraded"]) == ("One moment.", "canned")
    gateway.wait("the operator is asked", lambda: LEASE in gateway.kube.objects.get("leases", {}))


def test_a_client_that_goes_leaves_the_queue(asleep):
    gateway = asleep()
    body = json.dumps(CHAT).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(head + body)
        gateway.wait("it waits", lambda: num_held(gateway) == 1)
    gateway.wait("it is gone", lambda: num_held(gateway) == 0)
    assert gateway.wait_requests(1)[0]["outcome"] == "aborted"


def test_what_a_pod_that_is_leaving_refuses_waits_for_the_next_one(asleep, proxy, engines, background):
    gateway = asleep()
    proxy.answer = answer_of(b"503 Service Unavailable", DRAINING)
    gateway.kube.put(slice_of("old", engines[0], proxy.port))
    gateway.wait_replicas(1)
    asked = background(gateway.post, "/v1/chat/completions", CHAT)
    gateway.wait("it waits", lambda: num_held(gateway) == 1)
    assert len(proxy.requests) == 1
    wake(gateway, engines[1], "new")
    assert asked.result(60).status_code == 200
    assert len(proxy.requests) == 1, "the one that leaves is not asked again"


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"autoscaling": {"minReplicas": 1, "maxReplicas": 2}},
        {**SLEEPS, "suspend": True},
        {"autoscaling": {"minReplicas": 0, "maxReplicas": 2, "backend": "KEDA"}},
    ],
)
def test_where_no_lease_would_start_a_pod_no_request_waits(asleep, spec):
    gateway = asleep(spec)
    answer = gateway.post("/v1/chat/completions", CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    assert "leases" not in gateway.kube.objects or LEASE not in gateway.kube.objects["leases"]


def test_a_client_that_gives_up_while_it_waits_is_charged_nothing(asleep, kube, engines):
    kube.put(client_of(tokens_per_minute=60))
    gateway = asleep()
    for stream in (False, True) * 2:
        body = {**CHAT, "stream": stream}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                gateway.url + "/v1/chat/completions", json=body, headers=KEY, timeout=0.5, verify=NO_TLS
            )
    assert {one["outcome"] for one in gateway.wait_requests(4)} == {"aborted"}
    wake(gateway, engines[0])
    answer = gateway.post("/v1/chat/completions", CHAT, "sk-one")
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_waits_is_refused_as_soon_as_its_model_is_switched_off(asleep, background, stream):
    gateway = asleep(hold={"maxSeconds": 600})
    asked = background(gateway.post, "/v1/chat/completions", {**CHAT, "stream": stream})
    gateway.wait("it waits", lambda: num_held(gateway) == 1)
    rules = [{"targets": [{"deployment": "tiny"}]}]
    switch = {"enabled": True, "message": "Closed."}
    gateway.kube.put(llm_object("LLMRoute", "r", {"models": ["tiny"], "rules": rules, "killSwitch": switch}))
    answer = asked.result(60)
    assert "kill_switch" in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_fallback_before", [False, True])
def test_one_that_waits_gets_the_fallback_as_soon_as_its_model_is_switched_off_with_one(
    asleep, background, stream, has_fallback_before
):
    fallbacks = [{"deployment": "tiny"}, {"canned": "Closed, sorry."}]
    route = {"fallbacks": fallbacks} if has_fallback_before else {}
    gateway = asleep(hold={"maxSeconds": 600}, **route)
    asked = background(gateway.post, "/v1/chat/completions", {**CHAT, "stream": stream})
    gateway.wait("it waits", lambda: num_held(gateway) == 1)
    switched = {"killSwitch": {"enabled": True, "mode": "Fallback"}, "fallbacks": fallbacks}
    rules = [{"targets": [{"deployment": "tiny"}]}]
    gateway.kube.put(llm_object("LLMRoute", "r", {"models": ["tiny"], "rules": rules, **switched}))
    answer = asked.result(60)
    assert (answer.status_code, text_of(answer.text)) == (200, "Closed, sorry.")


def test_one_that_waits_for_a_fallback_that_is_switched_off_goes_to_the_next(asleep, background, kube):
    kube.put(llm_object("LLMDeployment", "small", {"model": {"servedName": "tiny"}, **SLEEPS}))
    kube.put(endpoint_slice("small-none", {}, model="small"))
    rules = [{"match": {"maxPromptTokens": 1}, "targets": [{"deployment": "small"}]}]
    rules += [{"targets": [{"deployment": "gone"}]}]
    spec = {"rules": rules, "fallbacks": [{"deployment": "small"}, {"canned": "Closed, sorry."}]}
    gateway = asleep(hold={"maxSeconds": 600}, **spec)
    asked = background(gateway.post, "/v1/chat/completions", CHAT)
    gateway.wait("it waits", lambda: num_held(gateway, "small") == 1)
    spec["killSwitch"] = {"enabled": True, "mode": "Fallback"}
    kube.put(llm_object("LLMRoute", "r", {"models": ["tiny"], **spec}))
    assert text_of(asked.result(60).text) == "Closed, sorry."


def test_an_error_that_ends_a_request_within_a_fallback_says_nothing_of_the_fallback(
    asleep, background, kube
):
    kube.put(llm_object("LLMDeployment", "small", {"model": {"servedName": "tiny"}, **SLEEPS}))
    kube.put(endpoint_slice("small-none", {}, model="small"))
    spec = {"rules": [{"targets": [{"deployment": "gone"}]}], "fallbacks": [{"deployment": "small"}]}
    gateway = asleep(hold={"maxSeconds": 600}, **spec)
    asked = background(gateway.post, "/v1/chat/completions", CHAT)
    gateway.wait("it waits", lambda: num_held(gateway, "small") == 1)
    kube.put(llm_object("LLMRoute", "r", {"models": ["tiny"], **spec, "killSwitch": {"enabled": True}}))
    answer = asked.result(60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "kill_switch")
    assert "x-quire-degraded" not in answer.headers


def test_one_that_waits_is_refused_as_soon_as_nothing_will_start_a_pod(asleep, background):
    gateway = asleep(hold={"maxSeconds": 600})
    asked = background(gateway.post, "/v1/chat/completions", CHAT)
    gateway.wait("it waits", lambda: num_held(gateway) == 1)
    gateway.kube.put(llm_object("LLMDeployment", "tiny", {**SLEEPS, "suspend": True}))
    assert asked.result(60).json()["error"]["code"] == "hold_timeout"


def test_a_request_waits_once_whatever_its_fallbacks_are(asleep, kube):
    small = {"model": {"servedName": "tiny"}, **SLEEPS}
    kube.put(llm_object("LLMDeployment", "small", small))
    kube.put(endpoint_slice("small-none", {}, model="small"))
    fallbacks = [{"halveMaxTokens": True}, {"deployment": "small"}, {"canned": "Later."}]
    gateway = asleep(hold={"maxSeconds": 5}, fallbacks=fallbacks)
    begun = time.monotonic()
    answer = gateway.post("/v1/chat/completions", CHAT)
    assert text_of(answer.text) == "Later."
    assert time.monotonic() - begun < 2 * 5, "not five seconds for each"
    asked_for = {"tiny", "small"}
    gateway.wait("both are started", lambda: {name_of(one) for one in kube.objects["leases"]} >= asked_for)


def test_a_request_that_goes_on_with_what_no_pod_keeps_starts_none(asleep):
    gateway = asleep(hold={"maxSeconds": 1})
    body = {"model": "tiny", "input": "And?", "previous_response_id": "resp_0123456789ab_00"}
    refused = gateway.post("/v1/responses", body)
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    assert num_held(gateway) == 0 and LEASE not in gateway.kube.objects.get("leases", {})


def test_a_gateway_that_ends_leaves_no_lease(asleep):
    gateway = asleep(hold={"maxSeconds": 1})
    gateway.post("/v1/chat/completions", CHAT)
    gateway.wait("the operator is asked", lambda: LEASE in gateway.kube.objects.get("leases", {}))
    gateway.process.terminate()
    gateway.wait("it has ended", gateway.ended)
    assert LEASE not in gateway.kube.objects["leases"]


def test_long_bodies_that_wait_leave_room_for_the_requests_of_other_models(asleep, engines, background):
    gateway = asleep(hold={"maxSeconds": 600})
    gateway.kube.put(endpoint_slice("awake", {"awake": "127.0.0.1"}, model="awake", port=engines[0].port))
    gateway.kube.put(llm_object("LLMDeployment", "awake", {"model": {"servedName": "tiny"}}))
    gateway.wait("it is known", lambda: gateway.replicas(model="awake") == 1)
    long = {**CHAT, "messages": [{"role": "user", "content": "a " * 150_000}]}
    for _ in range(80):
        background(gateway.post, "/v1/chat/completions", long)
    gateway.wait("as many wait as may", lambda: any(one["status"] == 503 for one in gateway.requests()))
    refused = [one for one in gateway.requests() if one["status"] == 503]
    assert num_held(gateway) < 80 and refused
    assert gateway.post("/v1/chat/completions", {**CHAT, "model": "awake"}).status_code == 200
    gateway.process.kill()  # those that wait would do so for ten minutes
