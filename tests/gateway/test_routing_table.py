"""Which route has which model, which client which key, and where a request goes."""

import hashlib
import random
from collections import Counter

import pytest

from quire_gateway import arms
from quire_gateway.dispatch import Dispatcher
from quire_gateway.llm_client import key_hash
from quire_gateway.llm_route import Strategy, Target
from quire_gateway.openai.calls import CHAT, Call, read, with_model
from quire_gateway.replicas import ReplicaTable
from quire_gateway.routing.by_load import RoundRobin
from quire_gateway.routing_state import RoutingState
from quire_gateway.routing_table import resolve
from quire_gateway.settings import Timeouts
from quire_http.errors import ApiError
from tests.gateway.kube_stub import NAMESPACE, endpoint_slice, llm_object

KEY = b"Bearer sk-alice"


DEPLOYMENT = ("LLMDeployment", "tiny", {"model": {}})


def route(name="r", models=("chat",), targets=(("tiny", 1),), *, created="2026-01-01T00:00:00Z", **spec):
    rules = [{"targets": [{"deployment": one, "weight": weight} for one, weight in targets]}]
    spec = {"models": list(models), "rules": rules, **spec}
    return llm_object("LLMRoute", name, spec, created=created)


def client(name="alice", key="sk-alice", *, created="2026-01-01T00:00:00Z", **spec):
    hashes = [hashlib.sha256(key.encode()).hexdigest()]
    return llm_object("LLMClient", name, {"keyHashes": hashes, **spec}, created=created)


class World:
    """A dispatcher over LLMDeployments that each have one replica."""

    def __init__(self, clock, *deployments, require_keys=False):
        self.table = ReplicaTable((NAMESPACE,), 8001, clock, lambda _: RoundRobin())
        for number, name in enumerate(deployments):
            self.table.put(endpoint_slice(name, {name: f"10.0.0.{number}"}, model=name))
        self.state = RoutingState()
        self.dispatcher = Dispatcher(self.table, self.state, Timeouts(), require_keys=require_keys)

    def put(self, *bodies):
        for body in bodies:
            stores = {
                "LLMRoute": "routes",
                "LLMClient": "clients",
                "LLMDeployment": "deployments",
                "LLMExternalBackend": "externals",
            }
            getattr(self.state, stores[body["kind"]]).put(body)
        return self

    def ask(self, model="chat", prompt=("user", "hi"), headers=(), key=None):
        client = None if key is None else self.dispatcher.client(key)
        return self.dispatcher.destination(Call(model, prompt=prompt), dict(headers), client)

    def refusal(self, **request):
        with pytest.raises(ApiError) as refused:
            self.ask(**request)
        return refused.value.status, refused.value.code


@pytest.fixture
def world(clock):
    return World(clock, "tiny", "next")


@pytest.mark.parametrize(
    ("routing", "strategy"),
    [
        ({}, Strategy()),
        ({"sessionHeader": "x-thread"}, Strategy("Prefix")),
        ({"strategy": "LeastLoad"}, Strategy("LeastLoad")),
        ({"strategy": "Session", "sessionHeader": "x-thread"}, Strategy("Session", "x-thread")),
    ],
)
def test_a_route_says_how_a_replica_is_chosen(clock, routing, strategy):
    assert World(clock, "tiny").put(route(routing=routing)).ask().strategy == strategy


def test_without_routes_each_deployment_is_a_model_under_its_own_name(world):
    assert world.dispatcher.models(None) == ["next", "tiny"]
    assert world.ask("tiny").replicas.name == "tiny"
    assert world.refusal(model="other") == (404, "model_not_found")


def test_a_route_takes_its_names_before_deployments_which_keep_the_others(world):
    world.put(route(models=("chat", "next")))
    assert world.dispatcher.models(None) == ["chat", "next", "tiny"]
    assert [world.ask(name).replicas.name for name in ("chat", "next", "tiny")] == ["tiny"] * 3
    assert world.ask("chat").served_name == "tiny"


def test_a_name_belongs_to_the_oldest_route_and_a_younger_one_is_not_accepted_at_all():
    young = route("young", ("a", "b"), created="2026-02-01T00:00:00Z")
    table = resolve([young, route("old", ("b",))], [], [])
    assert {name: one.name for name, one in table.routes.items()} == {"b": "old"}
    reason, message = table.rejected["uid-young"]
    assert reason == "NameConflict" and "'b' of LLMRoute models/old" in message


def test_a_key_belongs_to_the_oldest_client():
    table = resolve([], [client("late", created="2026-02-01T00:00:00Z"), client("early")], [])
    assert [one.name for one in table.clients.values()] == ["early"]
    assert table.rejected["uid-late"][0] == "KeyConflict"


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("LLMRoute", {"models": 3}),
        ("LLMRoute", {"models": ["a"], "rules": [{"targets": []}]}),
        ("LLMRoute", {"models": ["a"], "rules": [], "rollout": {"deployment": "next", "steps": []}}),
        ("LLMRoute", {"models": ["a"], "rules": [], "prices": {"promptPerMillion": "NaN"}}),
        ("LLMClient", {"keyHashes": ["0" * 64], "budget": {"cost": "Infinity"}}),
        ("LLMClient", {"keyHashes": ["0" * 64], "limits": {"requestsPerMinute": 0}}),
        ("LLMDeployment", {"model": "tiny"}),
        ("LLMDeployment", {"model": {"servedName": ["tiny"]}}),
        ("LLMDeployment", {"model": {"aliases": 3}}),
        ("LLMDeployment", {"adapters": [None]}),
    ],
)
def test_an_object_that_cannot_be_read_is_rejected_and_disturbs_no_other(kind, spec):
    """The schema of the CRD refuses these; that of another version may have let them in."""
    odd = llm_object(kind, "odd", spec)
    bodies = {"LLMRoute": [route()], "LLMClient": [client()], "LLMDeployment": [llm_object(*DEPLOYMENT)]}
    table = resolve(*([odd, *each] if name == kind else each for name, each in bodies.items()))
    assert list(table.routes) == ["chat"]
    assert [one.name for one in table.clients.values()] == ["alice"]
    assert list(table.served_names.values()) == [("tiny",)]
    assert table.rejected["uid-odd"][0] == "Unreadable"


def test_the_first_rule_that_matches_decides(world):
    rules = [
        {"match": {"headers": {"x-team": "search"}}, "targets": [{"deployment": "next"}]},
        {"match": {"maxPromptTokens": 10}, "targets": [{"deployment": "tiny"}]},
    ]
    world.put(llm_object("LLMRoute", "r", {"models": ["chat"], "rules": rules}))
    long = ("user", "x" * 100)
    assert world.ask(headers={"x-team": "search"}, prompt=long).replicas.name == "next"
    assert world.ask(headers={"x-team": "other"}).replicas.name == "tiny"
    assert world.refusal(prompt=long) == (400, "no_matching_rule")


def test_a_deployment_that_is_not_there_gets_no_requests(world):
    world.put(route(targets=(("gone", 99), ("tiny", 1))), route("r2", ("dead",), (("gone", 1),)))
    assert {world.ask(prompt=("user", str(n))).replicas.name for n in range(50)} == {"tiny"}
    assert world.ask(model="dead").replicas.candidates(()) == []


def test_conversations_are_divided_by_weight_and_stay(world):
    world.put(route(targets=(("tiny", 90), ("next", 10)), routing={"sessionHeader": "x-session-id"}))
    arms_of = {n: world.ask(prompt=("system", "s", "user", f"q{n}")).replicas.name for n in range(2000)}
    assert Counter(arms_of.values())["next"] == pytest.approx(200, abs=50)
    calls = [
        read(CHAT, b'{"model":"chat","messages":[{"role":"user","content":"q"}%b]}' % more)
        for more in (b"", b',{"role":"assistant","content":"a"},{"role":"user","content":"more"}')
    ]
    first, second = (world.dispatcher.destination(call, {}, None).replicas.name for call in calls)
    assert first == second
    sessions = {"x-session-id": "s1"}
    assert len({world.ask(prompt=("user", str(n)), headers=sessions).replicas.name for n in range(50)}) == 1


def test_a_weight_that_grows_takes_conversations_and_moves_no_others():
    keys = [random.Random(n).randbytes(16) for n in range(3000)]
    before = [arms.choose((Target("a", 90), Target("b", 10)), key).deployment for key in keys]
    after = [arms.choose((Target("a", 90), Target("b", 90)), key).deployment for key in keys]
    assert Counter(zip(before, after, strict=True)).keys() == {("a", "a"), ("a", "b"), ("b", "b")}
    assert Counter(after)["b"] == pytest.approx(1500, abs=100)
    assert arms.choose((Target("a", 0),), keys[0]) is None


def test_a_kill_switch_refuses_with_its_message_until_it_is_off(world):
    world.put(route(killSwitch={"enabled": True, "message": "Stopped for an audit."}))
    with pytest.raises(ApiError, match="Stopped for an audit") as refused:
        world.ask()
    assert (refused.value.status, refused.value.code) == (503, "kill_switch")
    assert world.ask("tiny").replicas.name == "tiny"
    world.put(route(killSwitch={"enabled": False}))
    assert world.ask().replicas.name == "tiny"


def test_a_kill_switch_of_mode_fallback_leaves_the_fallbacks_that_are_no_targets(world):
    spec = {"baseURL": "https://a.example.com", "model": "m"}
    world.put(
        llm_object("LLMExternalBackend", "outside", spec), llm_object("LLMExternalBackend", "also", spec)
    )
    fallbacks = [
        *({"halveMaxTokens": True}, {"deployment": "tiny"}, {"deployment": "newest"}, {"deployment": "next"}),
        *({"external": "outside"}, {"external": "also"}, {"canned": "Later."}),
    ]
    rules = [
        {"match": {"headers": {"x-a": "b"}}, "targets": [{"external": "also"}]},
        {"targets": [{"deployment": "tiny"}]},
    ]
    rollout = {"deployment": "newest", "steps": [{"weight": 10}]}
    whole = {"rules": rules, "fallbacks": fallbacks, "rollout": rollout}
    world.put(route(killSwitch={"enabled": True, "mode": "Fallback", "message": "Closed."}, **whole))
    found = world.ask()
    assert [step.name for step in found.fallbacks] == ["deployment=next", "external=outside", "canned"]
    assert found.kill_switch.message == "Closed."
    world.put(route(killSwitch={"enabled": False, "mode": "Fallback"}, **whole))
    assert (world.ask().kill_switch, len(world.ask().fallbacks)) == (None, len(fallbacks))


def test_what_an_external_target_is_asked_by_and_charged(world):
    prices = {"promptPerMillion": "3"}
    spec = {"baseURL": "https://a.example.com", "model": "m", "prices": prices}
    world.put(llm_object("LLMExternalBackend", "outside", spec))
    world.put(route(rules=[{"targets": [{"external": "outside"}]}], cache={"ttlSeconds": 9}))
    found = world.ask()
    assert (found.served_name, found.prices.prompt_per_million, found.cache_seconds) == ("m", 3, 0)
    assert world.ask().replicas is found.replicas
    assert not world.table.models()[0].name.startswith("external"), "it is no name that clients can ask for"
    missing = route(rules=[{"targets": [{"external": "nowhere"}]}])
    assert world.put(missing).ask().replicas.replicas == {}


def test_a_route_says_how_long_and_how_often(world):
    world.put(
        route(reliability={"firstByteTimeoutSeconds": 5, "attempts": 1, "retryBudgetPercent": 0}),
        route("q", ("d",)),
    )
    found = world.ask()
    assert (found.timeouts.first_byte, found.timeouts.idle, found.attempts) == (5, Timeouts().idle, 1)
    assert not found.retries.take_retry(0.0)
    assert world.ask("d").retries.take_retry(0.0)
    assert world.ask().retries is found.retries  # whatever else changes


def test_the_name_that_replicas_answer_to_is_sent(world):
    world.put(
        route(), llm_object("LLMDeployment", "tiny", {"model": {"servedName": "org/tiny", "aliases": ["t"]}})
    )
    assert world.ask("tiny").served_name == "org/tiny"
    assert world.ask("chat").served_name == "org/tiny"


@pytest.mark.parametrize(
    "key", [b"", b"Bearer wrong", b"Basic sk-alice", b"sk-alice", b"Bearer ", b"Bearer \xff"]
)
def test_with_a_client_every_request_needs_a_key_of_one(world, key):
    world.ask("tiny", key=key)  # none is needed without clients
    world.put(client())
    assert world.refusal(model="tiny", key=key)[0] == 401
    assert world.ask("tiny", key=KEY).replicas.name == "tiny"
    assert world.dispatcher.client(b"bearer  sk-alice ").full_name == "models/alice"


def test_keys_can_be_required_before_there_is_a_client(clock):
    assert World(clock, "tiny", require_keys=True).refusal(model="tiny", key=KEY) == (401, "invalid_api_key")


def test_a_suspended_client_is_refused(world):
    world.put(client(suspended=True))
    assert world.refusal(model="tiny", key=KEY) == (403, "client_suspended")


def test_a_model_that_a_client_may_not_ask_for_looks_like_one_that_is_not_there(world):
    world.put(route(), client(allowedModels=["chat"]))
    alice = world.dispatcher.client(KEY)
    assert world.dispatcher.models(alice) == ["chat"]
    assert world.ask("chat", key=KEY).replicas.name == "tiny"
    messages = []
    for name in ("tiny", "nothing"):
        with pytest.raises(ApiError) as refused:
            world.ask(name, key=KEY)
        messages.append((refused.value.status, str(refused.value).replace(name, "NAME")))
    assert messages[0] == messages[1] and messages[0][0] == 404
    assert "there is chat." in messages[0][1]


def test_keys_longer_than_any_are_not_hashed():
    assert key_hash(b"Bearer " + b"x" * 513) == ""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"n": 1.50, "model" : "chat", "t":"chat"}', b'{"n": 1.50, "model" : "tiny", "t":"chat"}'),
        (b'{"model":"chat","x":{"model":"chat"}}', b'{"model":"tiny","x":{"model":"chat"}}'),
        (b'{"\\u006dodel":"chat"}', b'{"model":"tiny"}'),
        (b'{"x":{"model":"chat"},"\\u006Dodel":"chat"}', b'{"x":{"model":"chat"},"model":"tiny"}'),
        (b'{"x":{"model":"chat"},"model":"c\\/"}', b'{"x":{"model":"chat"},"model":"tiny"}'),
        (
            b'{"model":"c\\u0068at","s":"\\"model\\":\\"chat\\""}',
            b'{"model":"tiny","s":"\\"model\\":\\"chat\\""}',
        ),
    ],
)
def test_the_name_of_the_model_is_changed_and_nothing_else(body, expected):
    assert with_model(body, "chat", "tiny") == expected
