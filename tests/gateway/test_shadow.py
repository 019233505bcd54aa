"""Copies of requests for a deployment that clients do not see, on real gateway processes."""

import asyncio
import gc
import json
import random
import socket
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler

import httpx
import pytest

from e2e.http_server import HttpServer
from quire_gateway.attempt import ReplicaUpstream, UpstreamRequest
from quire_gateway.dispatch import ShadowTarget
from quire_gateway.llm_route import ObjectError, parse
from quire_gateway.metrics import Metrics
from quire_gateway.openai.calls import read
from quire_gateway.outlier_detection import CONSECUTIVE_FAILURES, Verdict
from quire_gateway.replicas import ReplicaTable
from quire_gateway.routing.by_load import RoundRobin
from quire_gateway.routing.router import RequestFacts
from quire_gateway.settings import Timeouts
from quire_gateway.shadow import SECONDS, ShadowTraffic
from tests.gateway.fault_proxy import FaultProxy
from tests.gateway.kube_stub import NAMESPACE, endpoint_slice, llm_object
from tests.gateway.test_relay import CHAT
from tests.gateway.test_routing_table import route
from tests.server.launch import NO_TLS

PATH = "/v1/chat/completions"
BODY = {**CHAT, "model": "chat", "cache_salt": "mine"}


class Recorder(BaseHTTPRequestHandler):
    """Keeps what it was asked, and answers when it may."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((body, {name.lower(): value for name, value in self.headers.items()}))
        if self.server.is_stuck:
            self.server.go_on.wait(60)
        text = self.server.answer
        try:
            self.send_response(self.server.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
        except OSError:
            self.server.num_cut += 1

    def log_message(self, *args):
        pass


@pytest.fixture
def shadow():
    with HttpServer(("127.0.0.1", 0), Recorder) as server:
        server.daemon_threads = True
        server.requests, server.answer, server.status, server.num_cut = [], b"{}", 200, 0
        server.is_stuck, server.go_on = False, threading.Event()
        server.start()
        yield server
        server.go_on.set()
        server.shutdown()


@pytest.fixture
def gateway_for(start, kube, replica, shadow):
    """A gateway whose route copies requests for `tiny` to `newer`."""

    def gateway_for(port=None, **fields):
        kube.put(
            endpoint_slice("n", {"newer": "127.0.0.1"}, model="newer", port=port or shadow.server_address[1])
        )
        rules = [{"targets": [{"deployment": "tiny"}], "shadow": {"deployment": "newer", **fields}}]
        kube.put(llm_object("LLMRoute", "r", {"models": ["chat"], "rules": rules}))
        return start(endpoint_slice("s", {"one": "127.0.0.1"}, port=replica.server_address[1]))

    return gateway_for


def copies(gateway, outcome):
    try:
        return gateway.metric("gateway_shadow_requests_total", model="newer", outcome=outcome)
    except AssertionError:  # there was none yet
        return 0


def ask(gateway, **fields):
    return gateway.post(PATH, {**BODY, **fields})


def test_a_copy_is_the_request_under_the_deployments_name_and_the_client_sees_the_targets_answer(
    gateway_for, shadow
):
    gateway = gateway_for()
    answer = ask(gateway)
    assert answer.json()["body"] == {**BODY, "model": "tiny"}
    gateway.wait("the copy has ended", lambda: copies(gateway, "success") == 1)
    ((body, headers),) = shadow.requests
    assert body == {**BODY, "model": "newer"}
    assert not {"authorization", "x-quire-usage", "x-quire-token-ids"} & headers.keys()
    assert headers["x-request-id"] == answer.headers["x-request-id"]
    (line,) = gateway.wait_requests(1)
    assert (line["deployment"], line["replicas"]) == ("tiny", ["one"])
    assert gateway.metric("gateway_requests_total", model="chat", status="success") == 1


def failing(shadow, proxy):
    shadow.status = 500


def full(shadow, proxy):
    shadow.status = 503


def huge(shadow, proxy):
    shadow.answer = b"x" * (8 << 20)


def gone(shadow, proxy):
    proxy.refuse = True


@pytest.mark.parametrize(
    ("fault", "outcome"), [(failing, "http_500"), (full, "http_503"), (huge, "too_long"), (gone, "error")]
)
def test_whatever_becomes_of_a_copy_the_client_gets_its_answer(gateway_for, shadow, fault, outcome):
    with FaultProxy(shadow.server_address[1]) as proxy:
        gateway = gateway_for(proxy.port)
        fault(shadow, proxy)
        assert ask(gateway).status_code == 200
        gateway.wait("the copy has ended", lambda: copies(gateway, outcome) == 1)
    assert gateway.wait_requests(1)[-1]["outcome"] == "success"


def test_stuck_copies_hold_back_no_request_and_are_so_many_at_most(gateway_for, shadow):
    shadow.is_stuck = True
    gateway = gateway_for(maxInFlight=2)
    assert [ask(gateway).status_code for _ in range(6)] == [200] * 6
    gateway.wait("two are stuck", lambda: len(shadow.requests) == 2)
    assert copies(gateway, "full") == 4
    shadow.go_on.set()
    gateway.wait("both have ended", lambda: copies(gateway, "success") == 2)
    shadow.is_stuck = False
    ask(gateway)
    gateway.wait("there is room again", lambda: copies(gateway, "success") == 3)


def test_a_copy_goes_on_when_its_client_hangs_up_and_ends_with_the_gateway(gateway_for, shadow):
    shadow.is_stuck = True
    gateway = gateway_for()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(gateway.url + PATH, json={**BODY, "stream": True}, timeout=3, verify=NO_TLS)
    gateway.wait("the copy runs", lambda: len(shadow.requests) == 1)
    assert gateway.wait_requests(1)[-1]["outcome"] == "aborted"
    assert copies(gateway, "cancelled") == 0
    gateway.terminate()
    assert gateway.wait_end() == 0
    assert SECONDS > 60, "it was the end of the gateway, and not the copy's time"


def test_a_deployment_without_pods_gets_none_and_wakes_none(gateway_for, kube):
    gateway = gateway_for()
    kube.remove("n")
    gateway.wait("it is seen", lambda: ask(gateway).status_code == 200 and copies(gateway, "no_replica") >= 1)


def test_a_share_is_copied(gateway_for, shadow):
    gateway = gateway_for(percent=30, maxInFlight=100)
    for _ in range(60):
        assert ask(gateway).status_code == 200
    gateway.wait("all have ended", lambda: copies(gateway, "success") == len(shadow.requests))
    assert 3 <= len(shadow.requests) <= 42, "18 are expected; 1 in 10^6 runs is outside"


def run_copies(shadow, *bodies, seconds, prepare=lambda model: None):
    """How copies end in a process with its own limit of time."""
    table = ReplicaTable((NAMESPACE,), 0, lambda: 0.0, lambda _: RoundRobin())
    table.put(endpoint_slice("n", {"a": "127.0.0.1"}, model="newer", port=shadow.server_address[1]))
    metrics = Metrics(table)
    shadow.model = table.at((NAMESPACE, "newer"))
    prepare(shadow.model)
    target = ShadowTarget(table.at((NAMESPACE, "newer")), "newer", Timeouts(), 100, 100)

    async def run():
        upstream = ReplicaUpstream()
        traffic = ShadowTraffic(upstream, metrics, random.Random(), seconds)
        for body in bodies:
            traffic.copy(target, UpstreamRequest(PATH, {}, body, False), RequestFacts("chat"), "chat")
        await asyncio.gather(*traffic._tasks)
        assert (traffic._num_bytes, traffic._in_flight) == (0, {})
        await upstream.close()

    asyncio.run(run())
    (family,) = (one for one in metrics.registry.collect() if one.name == "gateway_shadow_requests")
    return {one.labels["outcome"]: one.value for one in family.samples if one.name.endswith("_total")}


def test_a_copy_that_takes_too_long_is_ended(shadow):
    shadow.is_stuck = True
    assert run_copies(shadow, b'{"model": "chat"}', seconds=2) == {"timeout": 1}
    assert len(shadow.requests) == 1


def test_copies_have_so_many_bytes_together_at_most(shadow):
    long = b'{"model": "chat", "a": "%b"}' % (b"x" * ((1 << 20) - 200))
    assert run_copies(shadow, *[long] * 18, seconds=60) == {"success": 15, "full": 3}


@pytest.mark.parametrize(("text", "number"), [("x", 1_000_000), ("\U0001f600", 250_000), ("x", 100)])
async def test_copies_take_as_much_memory_as_is_counted_of_them(text, number):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.setblocking(False)
        table = ReplicaTable((NAMESPACE,), 0, lambda: 0.0, lambda _: RoundRobin())
        table.put(endpoint_slice("n", {"a": "127.0.0.1"}, model="newer", port=listener.getsockname()[1]))
        target = ShadowTarget(table.at((NAMESPACE, "newer")), "newer", Timeouts(), 100, 100)
        upstream, metrics, peers = ReplicaUpstream(), Metrics(table), []
        traffic = ShadowTraffic(upstream, metrics, random.Random())

        async def begin_copy():
            """It is sent to a replica that reads no more than its beginning."""
            body = {"model": "chat", "messages": [{"role": "user", "content": text * number}]}
            data = bytearray(json.dumps(body, ensure_ascii=False).encode())
            facts = RequestFacts("chat", read(PATH, data).prompt)
            traffic.copy(target, UpstreamRequest(PATH, {}, data, False), facts, "chat")
            peer, _ = await asyncio.get_running_loop().sock_accept(listener)
            await asyncio.get_running_loop().sock_recv(peer, 1000)
            peers.append(peer)

        await begin_copy()  # what all have in common is there
        tracemalloc.start()
        counted = traffic._num_bytes
        for _ in range(10):
            await begin_copy()
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        counted = traffic._num_bytes - counted
        await traffic.close()
        await upstream.close()
        for peer in peers:
            peer.close()
    assert 0.5 * counted <= held <= 1.2 * counted


def test_copies_that_fail_eject_no_replica_for_the_requests_of_clients(shadow):
    shadow.status = 500
    body = b'{"model": "chat"}'
    assert run_copies(shadow, *[body] * 8, seconds=60) == {"http_500": 8}
    assert shadow.model.candidates([])
    assert not shadow.model.outliers.is_ejected("a")


def test_an_ejected_replica_gets_no_copy_not_even_to_try_it(shadow):
    def eject(model):
        for _ in range(CONSECUTIVE_FAILURES):
            model.outliers.begin("a")
            model.outliers.end("a", Verdict.FAILURE, {"a", "b"})
        assert model.outliers.is_ejected("a")

    assert run_copies(shadow, b'{"model": "chat"}', seconds=60, prepare=eject) == {"no_replica": 1}
    assert shadow.requests == []


def test_a_body_that_cannot_be_written_with_another_name_is_not_sent(shadow):
    deep = b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}"
    assert run_copies(shadow, deep, seconds=60) == {"error": 1}
    assert shadow.requests == []


def test_a_shadow_without_a_deployment_is_none():
    with pytest.raises(ObjectError):
        parse(route(rules=[{"targets": [{"deployment": "a"}], "shadow": {"percent": 3}}]))
