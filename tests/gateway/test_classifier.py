"""A route's classifier: a real HTTP server that is asked, and that breaks, and what becomes of requests."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_network

import aiohttp
import pytest

from e2e.http_server import HttpServer
from quire_gateway import classifier as module
from quire_gateway.classifier import Classifier
from quire_gateway.llm_route import ObjectError, parse
from quire_gateway.metrics import Metrics
from quire_gateway.openai.calls import CHAT, read
from quire_gateway.public_addresses import CLUSTER_NETWORKS, AddressGuard
from quire_gateway.replicas import ReplicaTable
from tests.gateway.kube_stub import llm_object
from tests.gateway.test_routing_table import World, route

LONG = 60.0  # seconds: a busy machine is no slow classifier
BODY = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function"}]}


class Answers(BaseHTTPRequestHandler):
    """Answers with what the test says."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        server.questions.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        server.paths.append((self.path, self.client_address[1]))
        server.asked.set()
        if server.is_slow:
            server.go_on.wait(LONG)
        status, text = server.answer
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@pytest.fixture
def service():
    with HttpServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        server.questions, server.paths, server.answer = [], [], (200, b'{"class": "simple"}')
        server.asked, server.go_on, server.is_slow = threading.Event(), threading.Event(), False
        server.start()
        yield server
        server.go_on.set()
        server.shutdown()


def spec_of(service):
    return {"service": "classes", "port": service.server_address[1], "path": "/classify"}


def ask(monkeypatch, service, *calls, budget=LONG, networks=("127.0.0.0/8",)):
    """The classes of requests, and the metrics. Names of Services are those of this host here."""

    async def resolve(self, host, port=0, family=0):
        assert host == "classes.models.svc"
        found = {"hostname": host, "host": "127.0.0.1", "port": port, "family": 2, "proto": 0, "flags": 0}
        return [found]

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
    metrics = Metrics(ReplicaTable((), 0, lambda: 0.0, lambda _: None))
    asked = parse(route(routing={"classifier": spec_of(service)}))

    async def run():
        guard = AddressGuard((*CLUSTER_NETWORKS, *map(ip_network, networks)))
        classifier = Classifier(guard, metrics, budget)
        try:
            return [await classifier.classify(asked, call) for call in calls]
        finally:
            await classifier.close()

    return asyncio.run(run()), metrics.registry


def call_of(**fields):
    return read(CHAT, json.dumps({**BODY, **fields}).encode())


def count(registry, outcome):
    return registry.get_sample_value("gateway_classifications_total", {"model": "chat", "outcome": outcome})


def test_a_request_is_asked_about_by_its_prompt_over_a_connection_that_is_kept(monkeypatch, service):
    found, metrics = ask(monkeypatch, service, call_of(), call_of())
    assert found == ["simple", "simple"]
    assert service.questions[0] == {
        "model": "chat",
        "promptStart": "user\nHi",
        "promptEnd": "user\nHi",
        "promptTokens": 1,
        "tools": True,
    }
    assert service.paths[0] == service.paths[1], "the same path, and the same connection"
    assert service.paths[0][0] == "/classify"
    assert count(metrics, "classified") == 2


def test_of_a_long_prompt_both_ends_are_sent_and_no_more(monkeypatch, service):
    messages = [{"role": "user", "content": f"{number} " + "é" * 100_000} for number in range(100)]
    messages.append({"role": "user", "content": "the question"})
    ask(monkeypatch, service, call_of(messages=messages))
    (question,) = service.questions
    assert question["promptStart"].startswith("user\n0 é") and question["promptEnd"].endswith("the question")
    assert max(len(question["promptStart"]), len(question["promptEnd"])) == module._CHARACTERS


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ((200, b"garbage"), "invalid"),
        ((200, b"[]"), "invalid"),
        ((200, b'{"class": 3}'), "invalid"),
        ((200, b'{"class": "Not A Class"}'), "invalid"),
        ((200, b"x" * 100_000), "invalid"),
        ((500, b'{"class": "simple"}'), "error"),
        ((307, b""), "error"),
    ],
)
def test_an_answer_that_is_none_is_no_class(monkeypatch, service, answer, outcome):
    service.answer = answer
    found, metrics = ask(monkeypatch, service, call_of())
    assert (found, count(metrics, outcome)) == ([""], 1)


def test_a_late_answer_is_no_class_and_the_request_waits_no_longer(monkeypatch, service):
    service.is_slow = True
    found, metrics = ask(monkeypatch, service, call_of(), budget=0.5)
    assert service.asked.is_set(), "it was asked, and has not answered"
    assert (found, count(metrics, "timeout")) == ([""], 1)
    assert module.BUDGET_SECONDS == 0.010


def test_one_that_is_away_is_no_class(monkeypatch, service):
    service.shutdown()
    service.server_close()
    found, metrics = ask(monkeypatch, service, call_of())
    assert (found, count(metrics, "error")) == ([""], 1)


def test_a_service_that_stands_for_the_gateways_own_pod_is_not_asked(monkeypatch, service):
    found, metrics = ask(monkeypatch, service, call_of(), networks=())
    assert (found, count(metrics, "error"), service.questions) == ([""], 1, [])


@pytest.mark.parametrize(
    "classifier",
    [{"service": "a.b"}, {"service": "a", "path": "@evil/"}, {"service": "a", "port": "x"}, {"port": 1}],
)
def test_a_classifier_that_the_crd_would_refuse_is_none(classifier):
    with pytest.raises(ObjectError):
        parse(route(routing={"classifier": classifier}))


RULES = [
    {"match": {"tools": True, "class": "hard"}, "targets": [{"deployment": "next"}]},
    {"match": {"tools": False, "maxPromptTokens": 5}, "targets": [{"deployment": "next"}]},
    {"targets": [{"deployment": "tiny"}]},
]


def test_rules_match_classes_and_tools(clock):
    world = World(clock, "tiny", "next").put(
        route(rules=RULES, routing={"classifier": {"service": "classes"}})
    )

    def target(**fields):
        call = module.Call("chat", prompt=("user", "hi"), **fields)
        return world.dispatcher.destination(call, {}, None).replicas.name

    assert target(has_tools=True, request_class="hard") == "next"
    assert target(has_tools=True, request_class="simple") == target(has_tools=True) == "tiny"
    assert target(request_class="hard") == "next"
    assert target(has_tools=True, request_class="") == "tiny"


@pytest.mark.parametrize(
    ("fields", "has_tools"),
    [({"tools": []}, False), ({"tools": None}, False), ({}, True), ({"tools": [], "functions": [{}]}, True)],
)
def test_what_has_tools(fields, has_tools):
    assert call_of(**fields).has_tools is has_tools


def test_a_route_is_asked_for_its_classifier_by_those_that_may_use_it(clock):
    world = World(clock, "tiny").put(route(), llm_object("LLMClient", "a", {"keyHashes": []}))
    assert world.dispatcher.route("chat", None).name == "r"
    assert world.dispatcher.route("tiny", None) is None
    world.put(route(killSwitch={"enabled": True}))
    assert world.dispatcher.route("chat", None) is None
