"""LoRA adapters that LLMDeployments name are models of the gateway: whose a name is, and who answers."""

import hashlib
import json
from http.server import BaseHTTPRequestHandler

import httpx
import pytest

from e2e.http_server import HttpServer
from quire_gateway.hidden_adapters import HiddenAdapters, hidden_adapters
from quire_gateway.llm_client import key_hash
from quire_gateway.load_poller import adapter_states
from quire_gateway.outlier_detection import CONSECUTIVE_FAILURES, Verdict
from quire_gateway.replica import STALE_SECONDS
from quire_gateway.replicas import ReplicaTable
from quire_gateway.routing.by_load import RoundRobin
from quire_gateway.routing_state import RoutingState
from tests.gateway.conftest import IN_CLUSTER, SLEEPS, num_held
from tests.gateway.kube_stub import NAMESPACE, KubeStub, endpoint_slice, llm_object
from tests.gateway.launch import Gateway
from tests.gateway.test_routing_table import World, route
from tests.server.launch import NO_TLS

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
KEY = "sk-alice"


def deployment(name, *adapters, model=None, **fields):
    spec = {"model": model or {}, "adapters": [{"name": one} for one in adapters]}
    return llm_object("LLMDeployment", name, spec, **fields)


def asked_of(world, name):
    """What a request for a name is sent to, under which name, and as which adapter."""
    found = world.ask(name)
    return found.replicas.audience, found.served_name, found.adapter


# Whose a name is


def test_an_adapter_whose_name_another_object_has_is_logged_and_counted(clock, caplog):
    late = deployment("next", "support", "own", created="2026-02-01T00:00:00Z")
    world = World(clock, "tiny", "next").put(late, deployment("tiny", "support", "next"))
    hidden = HiddenAdapters(world.state, world.table)
    hidden.look()
    hidden.look()  # says it once
    taken = [("models/next", "support", "LLMDeployment models/tiny")]
    taken.append(("models/tiny", "next", "LLMDeployment models/next"))
    assert [(one.deployment, one.adapter, one.taken_by) for one in caplog.records] == taken
    assert "rename it" in caplog.text
    (metric,) = hidden.collect()
    assert [tuple(one.labels.values()) for one in metric.samples] == taken

    world.put(deployment("next"), route(models=("support",), targets=(("next", 1),)))
    assert hidden_adapters(world.state.table, world.table) == {
        ("models/tiny", "support", "LLMRoute models/r"),
        ("models/tiny", "next", "LLMDeployment models/next"),
    }
    world.put(route(models=("support",), targets=(("tiny", 1),)), deployment("tiny", "support"))
    assert hidden_adapters(world.state.table, world.table) == set()


def test_of_two_namespaces_the_adapter_of_the_later_one_is_hidden(clock):
    table, state = ReplicaTable(("a", "b"), 8001, clock, lambda _: RoundRobin()), RoutingState()
    for namespace, name in (("a", "x"), ("b", "y")):
        found = endpoint_slice(name, {name: "10.0.0.1"}, model=name)
        table.put({**found, "metadata": {**found["metadata"], "namespace": namespace}})
        state.deployments.put(deployment(name, "support", namespace=namespace))
    assert hidden_adapters(state.table, table) == {("b/y", "support", "LLMDeployment a/x")}


def test_an_adapter_is_a_model_that_its_deployments_replicas_are_asked_for_by_this_name(clock):
    world = World(clock, "tiny", "next").put(deployment("tiny", "support", model={"servedName": "org/tiny"}))
    assert world.dispatcher.models(None) == ["next", "support", "tiny"]
    assert asked_of(world, "support") == ("models/tiny", "support", "support")
    assert asked_of(world, "tiny") == ("models/tiny", "org/tiny", "")
    assert world.dispatcher.parent("support", None) == "tiny"
    assert world.dispatcher.parent("tiny", None) is None
    world.put(deployment("tiny"))
    assert world.refusal(model="support") == (404, "model_not_found")


def test_a_name_is_a_routes_then_a_deployments_then_the_oldest_adapters(clock):
    late = deployment("next", "support", created="2026-02-01T00:00:00Z")
    world = World(clock, "tiny", "next").put(late, deployment("tiny", "support", "next"))
    assert asked_of(world, "support") == ("models/tiny", "support", "support")
    assert asked_of(world, "next") == ("models/next", "next", ""), "its own name before another's adapter"
    world.put(route(models=("support",), targets=(("next", 1),)))
    assert world.ask("support").route == "models/r"
    assert world.dispatcher.parent("support", None) is None


def test_an_adapter_of_the_first_namespace_is_before_a_deployment_of_a_later_one(clock):
    table = ReplicaTable((NAMESPACE, "other"), 8001, clock, lambda _: RoundRobin())
    theirs = endpoint_slice("s", {"z": "10.0.9.9"}, model="support")
    theirs["metadata"]["namespace"] = "other"
    table.put(theirs)
    table.put(endpoint_slice("s", {"a": "10.0.0.1"}))
    assert table.place("support") == ("other", "support")
    assert table.place("support", [(NAMESPACE, "tiny")]) == (NAMESPACE, "tiny")
    assert table.place("support", [("other", "support"), (NAMESPACE, "gone")]) == ("other", "support")


@pytest.mark.parametrize("name", ["tiny", "org/tiny", "alias"])
def test_the_names_of_the_model_itself_are_no_adapters(clock, name):
    model = {"servedName": "org/tiny", "aliases": ["alias"]}
    world = World(clock, "tiny").put(deployment("tiny", name, model=model))
    assert world.state.table.adapters == {}
    assert world.dispatcher.models(None) == ["tiny"]


def test_a_route_named_like_an_adapter_has_it_answer_at_those_targets_that_have_it(clock):
    world = World(clock, "tiny", "next").put(deployment("tiny", "support"), deployment("next"))
    shadow = {"shadow": {"deployment": "next"}}
    rules = [{"targets": [{"deployment": "tiny"}], **shadow}]
    world.put(route(models=("support",), rules=rules, fallbacks=[{"deployment": "next"}]))
    assert asked_of(world, "support") == ("models/tiny", "support", "support")
    found = world.ask("support")
    (step,) = found.fallbacks
    assert (step.destination.served_name, step.destination.adapter) == ("next", "")
    assert (found.shadow.served_name, found.shadow.adapter) == ("next", "")


def test_a_client_may_ask_for_the_adapters_that_its_models_name(clock):
    hashes = [hashlib.sha256(KEY.encode()).hexdigest()]
    client = {"keyHashes": hashes, "allowedModels": ["support"]}
    world = World(clock, "tiny").put(deployment("tiny", "support", "sales"))
    world.put(llm_object("LLMClient", "alice", client))
    key = f"Bearer {KEY}".encode()
    client = world.dispatcher.client(key)
    assert client is not None and key_hash(key) in client.key_hashes
    assert world.dispatcher.models(client) == ["support"]
    assert world.ask("support", key=key).adapter == "support"
    assert world.refusal(model="sales", key=key) == (404, "model_not_found")
    assert world.refusal(model="tiny", key=key) == (404, "model_not_found")
    assert world.dispatcher.parent("support", client) is None, "a client sees no name that it may not ask for"


def test_labels_are_the_adapters_of_deployments_that_exist(clock):
    world = World(clock, "tiny").put(deployment("tiny", "support"))
    assert world.dispatcher.names()[0] == {"tiny", "support"}


# Which replicas are asked


@pytest.fixture
def model(clock):
    table = ReplicaTable((NAMESPACE,), 8001, clock, lambda _: RoundRobin())
    table.put(endpoint_slice("s", {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}))
    return table.at((NAMESPACE, "tiny"))


def polled(model, now, **states):
    for uid, state in states.items():
        model.replicas[uid].polled_adapters({"support": state} if state else {}, now)


def candidates(model, *tried):
    return {one.endpoint.uid for one in model.candidates(tried, "support")}


def test_replicas_that_have_an_adapter_are_asked_before_those_that_do_not_say(model, clock):
    assert candidates(model) == {*"abc"}
    polled(model, clock(), a="Ready", b="Loading")
    assert candidates(model) == {"a"}
    assert candidates(model, "a") == {"c"}
    polled(model, clock(), c="Failed")
    assert candidates(model, "a") == set()
    assert len(model.candidates(())) == 3, "the model itself is everywhere"


def test_one_that_was_ready_is_asked_though_it_says_nothing_any_more(model, clock):
    polled(model, clock(), a="Ready", b="", c="Fetching")
    clock.now += STALE_SECONDS + 1
    assert candidates(model) == {"a"}
    assert candidates(model, "a") == {"b", "c"}, "they may have it by now"


def test_one_that_has_answered_that_it_lacks_an_adapter_is_left_alone_for_a_while(model, clock):
    polled(model, clock(), a="Ready", b="Loading", c="Loading")
    model.replicas["a"].lacks_adapter("support", clock())
    assert candidates(model) == set()
    polled(model, clock(), a="Ready")
    assert candidates(model) == {"a"}, "a poll after it counts"
    model.replicas["a"].lacks_adapter("support", clock())
    clock.now += STALE_SECONDS + 1
    assert "a" in candidates(model)


def test_an_ejected_replica_that_has_the_adapter_is_better_than_a_well_one_without_it(model, clock):
    polled(model, clock(), a="Ready", b="Loading", c="Loading")
    for _ in range(CONSECUTIVE_FAILURES):
        model.outliers.end("a", Verdict.FAILURE, model.replicas)
    assert candidates(model) == {"a"}


@pytest.mark.parametrize(
    ("states", "is_loading"),
    [
        ({"a": "Fetching", "b": "Failed", "c": ""}, True),
        ({"a": "Failed", "b": "Unloaded", "c": "Failed"}, False),
        ({"a": "Loading", "b": "Ready", "c": "Loading"}, False),
        ({"a": "Loading", "b": "Loading"}, False),  # c may have it
    ],
)
def test_an_adapter_is_waited_for_where_no_replica_has_it_and_one_will(model, clock, states, is_loading):
    polled(model, clock(), **states)
    assert model.is_loading("support") == is_loading
    assert not model.is_loading("")


@pytest.mark.parametrize(
    ("text", "states"),
    [
        (
            b'{"adapters": [{"name": "a", "state": "Ready"}, {"name": "b", "state": "Failed"}]}',
            {"a": "Ready", "b": "Failed"},
        ),
        (b'{"adapters": []}', {}),
        (b"{}", None),
        (b"<html>", None),
        (b'{"adapters": null}', None),
        (b'{"adapters": ["a"]}', None),
        (b'{"adapters": [{"name": "a"}]}', None),
    ],
)
def test_the_states_in_a_replicas_status_are_read(text, states):
    assert adapter_states(text) == states


# A gateway before replicas that say which adapters they have


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        """/statusz."""
        self.server.num_polls += 1
        states = self.server.states
        status = {"sampleAge": 0.1, "queued": 0, "running": 0}
        if states is not None:
            status["adapters"] = [{"name": name, "state": state} for name, state in states.items()]
        self._json(200, status)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body["model"])
        if body["model"] not in ("tiny", *self.server.loaded):
            detail = {"message": "not served", "type": "x", "param": "model", "code": "model_not_found"}
            self._json(404, {"type": "error", "error": detail})
        elif "no" in body:
            self._json(404, {"error": {"message": "gone", "type": "x", "param": None, "code": "other"}})
        else:
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
            self._json(200, {"body": body, "choices": [], "usage": usage})

    def _json(self, status, document):
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


class Replica(HttpServer):
    """``states``: what /statusz says of adapters, None for nothing; ``loaded``: those that it has."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.states, self.loaded, self.asked, self.num_polls = None, (), [], 0

    def slice(self, uid):
        port = self.server_address[1]
        return endpoint_slice(f"tiny-{uid}", {uid: "127.0.0.1"}, port=port, health_port=port)


def say(gateway, *said):
    """Each replica of ``said`` has these adapters in these states, and no others, as the gateway knows when
    this returns.
    """
    for replica, states in said:
        replica.states, replica.asked = states, []
        replica.loaded = [name for name, state in states.items() if state == "Ready"]
    before = [replica.num_polls for replica, _ in said]
    gateway.wait(
        "the polls after these have begun",
        lambda: all(one.num_polls >= number + 2 for (one, _), number in zip(said, before, strict=True)),
    )


@pytest.fixture(scope="module")
def pair():
    """Two replicas."""
    with Replica() as one, Replica() as two:
        one.start()
        two.start()
        yield one, two
        one.shutdown()
        two.shutdown()


@pytest.fixture(scope="module")
def gateway(pair, tmp_path_factory):
    """A gateway before both."""
    with KubeStub() as kube:
        for uid, each in zip(("one", "two"), pair, strict=True):
            kube.put(each.slice(uid))
        kube.put(deployment("tiny", "support"))
        with Gateway(kube.url, tmp_path_factory.mktemp("adapters")) as gateway:
            yield gateway.wait_replicas(2)


def ask(gateway, path=CHAT, model="support", question="", **body):
    messages = [{"role": "user", "content": f"Question {question}"}]
    return httpx.post(
        gateway.url + path, json={"model": model, "messages": messages, **body}, timeout=60, verify=NO_TLS
    )


def test_requests_for_an_adapter_go_to_replicas_that_have_it_as_they_came(gateway, pair):
    say(gateway, (pair[0], {"support": "Fetching"}), (pair[1], {"support": "Ready"}))
    before = len(gateway.requests())
    for number in range(6):
        assert ask(gateway, question=number).json()["body"]["model"] == "support"
    assert (pair[0].asked, len(pair[1].asked)) == ([], 6)
    lines = gateway.wait_requests(6, before)
    assert {(line["model"], line["deployment"]) for line in lines} == {("support", "tiny")}
    assert gateway.metric("gateway_tokens_total", model="support", type="completion") == 12
    cards = {one["id"]: one for one in httpx.get(f"{gateway.url}/v1/models", verify=NO_TLS).json()["data"]}
    assert cards.keys() == {"tiny", "support"} and "parent" not in cards["tiny"]
    assert cards["support"]["parent"] == "tiny"
    assert httpx.get(f"{gateway.url}/v1/models/support", verify=NO_TLS).json() == cards["support"]


def test_where_no_replica_has_it_yet_clients_are_asked_to_come_again(gateway, pair):
    say(gateway, *((each, {"support": "Loading"}) for each in pair))
    answer = ask(gateway)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_not_ready")
    assert "adapter 'support' is not ready" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "5"
    assert [one.asked for one in pair] == [[], []]
    assert ask(gateway, model="tiny").status_code == 200


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_what_one_replica_does_not_have_though_it_said_so_another_one_answers(gateway, pair, path):
    say(gateway, *((each, {"support": "Ready"}) for each in pair))
    pair[0].loaded = ()
    before = len(gateway.requests())
    for number in range(50):
        assert ask(gateway, path, question=number).status_code == 200
        if pair[0].asked:
            break
    assert gateway.wait_requests(number + 1, before)[-1]["replicas"] == ["one", "two"]


def test_where_no_replica_has_it_though_all_said_so_each_is_asked_once(gateway, pair):
    say(gateway, *((each, {"support": "Ready"}) for each in pair))
    for each in pair:
        each.loaded = ()
    before = len(gateway.requests())
    answer = ask(gateway)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_not_ready")
    (line,) = gateway.wait_requests(1, before)
    assert sorted(line["replicas"]) == ["one", "two"]


def test_another_404_of_a_replica_is_the_answer(gateway, pair):
    say(gateway, *((each, {"support": "Ready"}) for each in pair))
    answer = ask(gateway, no=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "other")
    assert sum(len(one.asked) for one in pair) == 1


@pytest.fixture
def woken(pair, kube, tmp_path):
    """A gateway before a model without pods, and its first replica."""
    kube.put(llm_object("LLMDeployment", "tiny", {"adapters": [{"name": "support"}], **SLEEPS}))
    kube.put(endpoint_slice("tiny-none", {}))
    with Gateway(kube.url, tmp_path, **IN_CLUSTER) as gateway:
        gateway.kube = kube
        yield gateway.wait_replicas(0), pair[0]


def test_a_request_for_an_adapter_starts_a_pod_and_waits_until_it_has_it_or_cannot(woken, background):
    gateway, replica = woken
    replica.states, replica.loaded = {"support": "Fetching"}, ()
    asked = background(ask, gateway)
    leases = gateway.kube.objects.setdefault("leases", {})
    gateway.wait("a pod is asked for", lambda: "quire-demand-models.tiny" in leases)
    gateway.kube.put(replica.slice("one"))
    gateway.wait_replicas(1)
    say(gateway, (replica, {"support": "Fetching"}))
    assert ask(gateway, model="tiny").status_code == 200, "the model itself answers meanwhile"
    gateway.wait("the request for the adapter waits", lambda: num_held(gateway) == 1)
    assert not asked.done()
    replica.states, replica.loaded = {"support": "Ready"}, ("support",)
    assert asked.result(60).status_code == 200

    say(gateway, (replica, {"support": "Loading"}))
    asked = background(ask, gateway)
    gateway.wait("it waits", lambda: num_held(gateway) == 1)
    replica.states = {"support": "Failed"}
    answer = asked.result(60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_not_ready")
