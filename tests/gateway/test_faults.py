"""What clients see while replicas fail. Faults are of the network between the gateway and a real engine."""

import itertools
import json
import socket
import threading

import httpx
import pytest

from tests.gateway.conftest import slice_of
from tests.gateway.test_relay import CHAT
from tests.server.launch import NO_TLS

REFUSED = b'{"error": {"message": "full", "type": "overloaded_error", "code": "queue_full"}}'
BROKEN = b'{"error": {"message": "out of order", "code": "engine_unavailable"}}'
NUM_REQUESTS = 40  # with two replicas half of them meet the one that fails


NUMBERS = itertools.count()


def answer_of(status, body):
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nretry-after: 7\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def ask(gateway, **fields):
    """With a prompt of its own each time, so that not all go to one replica."""
    message = {"role": "user", "content": f"Once upon a time {next(NUMBERS)}"}
    return gateway.post("/v1/chat/completions", {**CHAT, "messages": [message], "max_tokens": 2, **fields})


def statuses(gateway, number=NUM_REQUESTS):
    """Of requests one after the other, so that load chooses none."""
    return {ask(gateway).status_code for _ in range(number)}


@pytest.fixture
def pair(start, engines, proxy):
    """A gateway before two replicas, one of which is behind the proxy."""

    def make(**environ):
        first = slice_of("one", engines[0], proxy.port)
        return start(first, slice_of("two", engines[1]), **environ)

    return make


def test_a_replica_that_is_gone_costs_no_request_and_is_left_alone_after_five(pair, proxy):
    gateway = pair()
    proxy.refuse = True
    assert statuses(gateway) == {200}
    ejections = gateway.metric("gateway_ejections_total", model="tiny")
    assert 1 <= ejections <= 3, "on a busy machine it is tried again meanwhile, once for each ejection"
    twice = [len(line["replicas"]) for line in gateway.wait_requests(NUM_REQUESTS)].count(2)
    assert twice == 5 + ejections - 1


@pytest.fixture
def silent_port():
    """A port that answers no connection, like a lost host: its queue is full, and packets are dropped."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        first.connect(listener.getsockname())
        second.settimeout(1)
        with pytest.raises(TimeoutError):
            second.connect(listener.getsockname())
        yield listener.getsockname()[1]


@pytest.mark.deep
def test_a_host_that_does_not_answer_costs_only_the_time_until_it_is_given_up(start, engines, silent_port):
    gateway = start(slice_of("one", engines[0], silent_port), slice_of("two", engines[1]))
    assert {ask(gateway, stream=stream).status_code for stream in (False, True) * 10} == {200}
    assert gateway.metric("gateway_ejections_total", model="tiny") >= 1
    assert gateway.metric("gateway_retries_total", model="tiny", reason="connect") >= 5


def test_a_replica_that_hangs_costs_only_the_time_until_it_is_given_up(pair, proxy):
    gateway = pair(FIRST_BYTE_SECONDS=0.5, WHOLE_ANSWER_SECONDS=0.5)
    proxy.hang = True
    assert {ask(gateway, stream=stream).status_code for stream in (False, True) * 10} == {200}
    assert gateway.metric("gateway_ejections_total", model="tiny") >= 1
    assert 5 <= gateway.metric("gateway_retries_total", model="tiny", reason="timeout") < 10


def test_a_replica_that_has_no_room_is_not_a_failed_one(pair, proxy):
    gateway = pair()
    proxy.answer = answer_of(b"503 Service Unavailable", REFUSED)
    assert statuses(gateway) == {200}
    assert gateway.metric("gateway_retries_total", model="tiny", reason="queue_full") > 5
    assert gateway.replicas("ejected") == 0


def test_a_replica_whose_engine_is_gone_is_left_alone(pair, proxy):
    gateway = pair()
    proxy.answer = answer_of(b"503 Service Unavailable", BROKEN)
    assert statuses(gateway) == {200}
    assert gateway.metric("gateway_retries_total", model="tiny", reason="http_503") == 5
    assert gateway.metric("gateway_ejections_total", model="tiny") >= 1


def test_the_last_refusal_is_the_answer_where_no_other_replica_is(start, engines, proxy):
    gateway = start(slice_of("one", engines[0], proxy.port))
    proxy.answer = answer_of(b"503 Service Unavailable", REFUSED)
    answer = ask(gateway)
    assert (answer.status_code, answer.content, answer.headers["retry-after"]) == (503, REFUSED, "7")
    assert len(proxy.requests) == 1  # never the same one again


def test_an_error_of_a_replica_is_read_up_to_a_bound(start, engines, proxy):
    gateway = start(slice_of("one", engines[0], proxy.port))
    proxy.answer = answer_of(b"503 Service Unavailable", b"x" * (4 << 20))
    answer = ask(gateway)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_lost")
    assert "longer than" in gateway.wait_requests(1)[-1]["broken"]


def test_a_lost_replica_is_a_502_where_no_other_one_is(start, engines, proxy):
    gateway = start(slice_of("one", engines[0], proxy.port))
    proxy.refuse = True
    answer = ask(gateway)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_lost")
    assert proxy.num_connections == 1


def test_a_request_that_is_wrong_is_not_tried_again(pair, proxy):
    gateway = pair()
    assert {ask(gateway, temperature=-1).status_code for _ in range(20)} == {400}
    assert all(len(line["replicas"]) == 1 for line in gateway.wait_requests(20))
    assert gateway.replicas("ejected") == 0


@pytest.mark.parametrize("num_events", [1, 3, 6])
def test_a_stream_that_is_cut_ends_with_one_error_event_after_whole_ones(start, engines, proxy, num_events):
    gateway = start(slice_of("one", engines[0], proxy.port))
    proxy.cut_after = num_events
    answer = ask(gateway, stream=True, max_tokens=40)
    assert answer.status_code == 200
    *events, error, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert len(events) == num_events
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)
    assert gateway.wait_requests(1)[-1]["outcome"] == "error"


def test_a_connection_that_the_replica_closes_in_the_moment_of_its_use_is_not_a_failure(pair, proxy):
    gateway = pair()
    proxy.drop_reused = True
    assert statuses(gateway, 60) == {200}
    assert proxy.num_connections > 10
    assert all(len(line["replicas"]) == 1 for line in gateway.wait_requests(60))
    assert gateway.replicas("ejected") == 0


def test_an_engine_that_is_silent_in_the_middle_of_a_stream_ends_it(start, engines, proxy):
    gateway = start(slice_of("one", engines[0], proxy.port), IDLE_SECONDS=1)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    proxy.answer = head + b'f\r\ndata: {"a": 1}\n\r\n1\r\n\n\r\n'
    answer = ask(gateway, stream=True)
    first, error, *_ = answer.text.split("\n\n")
    assert first == 'data: {"a": 1}'
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_timeout"


def test_a_pod_that_leaves_keeps_the_answers_that_it_has_begun(start, kube, engines):
    gateway = start(slice_of("one", engines[0]))
    body = {**CHAT, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", gateway.url + "/v1/chat/completions", json=body, timeout=60, verify=NO_TLS
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        kube.remove("tiny-one")
        kube.put(slice_of("two", engines[1]))
        gateway.wait_replicas(1)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert gateway.wait_requests(1)[-1]["outcome"] == "success"


def test_while_the_api_server_is_away_requests_go_on(start, kube, engines):
    gateway = start(slice_of("one", engines[0]), slice_of("two", engines[1]))
    kube.close()
    gateway.wait("the watch is lost", lambda: "cannot watch" in gateway.log.read_text())
    assert statuses(gateway, 10) == {200}
    assert gateway.probe("readyz") == 200


def test_a_drain_breaks_no_stream_and_ends_when_the_last_one_has(start, engines):
    gateway = start(slice_of("one", engines[0]))
    body = {**CHAT, "max_tokens": 300, "ignore_eos": True, "stream": True}
    done = []

    def read(answer):
        done.append([line for line in answer.iter_lines() if line][-1])

    with httpx.stream(
        "POST", gateway.url + "/v1/chat/completions", json=body, timeout=60, verify=NO_TLS
    ) as answer:
        reader = threading.Thread(target=read, args=(answer,))
        gateway.terminate()
        gateway.wait("not ready", lambda: gateway.probe("readyz") == 503)
        assert gateway.reason("readyz") == "Draining"
        reader.start()
        reader.join(60)
    assert done == ["data: [DONE]"]
    assert gateway.wait_end() == 0


def test_a_second_sigterm_ends_streams_with_an_error_event(start, engines, proxy):
    gateway = start(slice_of("one", engines[0], proxy.port))
    body = {**CHAT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", gateway.url + "/v1/chat/completions", json=body, timeout=60, verify=NO_TLS
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        gateway.terminate()
        gateway.wait("draining", lambda: gateway.probe("readyz") == 503)
        gateway.terminate()
        *_, error, done = (line for line in lines if line)
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "draining"
    assert gateway.wait_end() == 0
