"""Which pods are replicas of a model, by its EndpointSlices; how busy they are."""

import random

import pytest

from quire_gateway.llm_route import Strategy
from quire_gateway.outlier_detection import CONSECUTIVE_FAILURES, Verdict
from quire_gateway.replica import STALE_SECONDS
from quire_gateway.replicas import ReplicaTable
from quire_gateway.routing.by_load import LeastLoad, RoundRobin
from quire_gateway.routing.router import RequestFacts
from quire_gateway.routing.strategies import router_for
from tests.gateway.kube_stub import NAMESPACE, endpoint_slice


@pytest.fixture
def table(clock):
    return ReplicaTable((NAMESPACE, "other"), 8001, clock, lambda _: LeastLoad(random.Random(1)))


def endpoint(address="10.0.0.1", uid="a", **conditions):
    conditions = {"ready": True, "serving": True, "terminating": False} | conditions
    return {"addresses": [address], "conditions": conditions, "targetRef": {"uid": uid}}


def uids(table, model="tiny"):
    return set(table.at(table.place(model)).replicas)


@pytest.mark.parametrize(
    "conditions", [{"ready": False}, {"ready": True, "terminating": True}, {"ready": None}]
)
def test_pods_that_are_not_ready_or_leave_get_no_requests(table, conditions):
    table.put(endpoint_slice("s", {"a": endpoint(**conditions), "b": "10.0.0.2"}))
    assert uids(table) == {"b"}


def test_the_endpoints_of_several_slices_are_one_model_and_a_pod_in_two_of_them_is_one(table):
    table.put(endpoint_slice("s1", {"a": "10.0.0.1", "b": "10.0.0.2"}))
    table.put(endpoint_slice("s2", {"b": "10.0.0.2", "c": "10.0.0.3"}))
    assert uids(table) == {"a", "b", "c"}
    table.remove(endpoint_slice("s1", {}))
    assert uids(table) == {"b", "c"}


def test_a_pod_keeps_its_counts_whatever_happens_to_slices(table):
    table.put(endpoint_slice("s1", {"a": "10.0.0.1"}))
    table.at((NAMESPACE, "tiny")).replicas["a"].in_flight = 3
    table.put(endpoint_slice("s2", {"a": "10.0.0.1", "b": "10.0.0.2"}))
    table.remove(endpoint_slice("s1", {}))
    table.replace([endpoint_slice("s3", {"a": "10.0.0.1"})], NAMESPACE)
    assert {uid: one.in_flight for uid, one in table.at((NAMESPACE, "tiny")).replicas.items()} == {"a": 3}


def test_slices_of_other_services_of_an_llmdeployment_are_not_for_clients(table):
    table.put(endpoint_slice("s1", {"a": "10.0.0.1"}))
    table.put(endpoint_slice("s2", {"p": "10.0.0.9"}, service="tiny-prefill"))
    assert uids(table) == {"a"}


def test_a_model_without_ready_pods_is_known_and_one_without_slices_is_not(table):
    table.put(endpoint_slice("s", {}))
    assert uids(table) == set()
    table.remove(endpoint_slice("s", {}))
    assert table.place("tiny") is None


def test_of_two_models_with_one_name_the_one_in_the_first_namespace_is_served(table):
    elsewhere = endpoint_slice("s", {"z": "10.0.9.9"})
    elsewhere["metadata"]["namespace"] = "other"
    table.put(elsewhere)
    assert uids(table) == {"z"}
    table.put(endpoint_slice("s", {"a": "10.0.0.1"}))
    assert uids(table) == {"a"}
    table.replace([], NAMESPACE)
    assert uids(table) == {"z"}
    assert [one.name for one in table.models()] == ["tiny"]


def test_urls_have_the_ports_of_the_slice_and_ipv6_addresses_their_brackets(table):
    table.put(endpoint_slice("s", {"a": "fd00::1"}, port=9000, health_port=9001))
    (replica,) = table.replicas()
    assert replica.endpoint.url == "http://[fd00::1]:9000"
    assert replica.endpoint.health_url == "http://[fd00::1]:9001"


def test_the_load_of_others_counts_until_it_is_old(table, clock):
    table.put(endpoint_slice("s", {"a": "10.0.0.1"}))
    (replica,) = table.replicas()
    assert replica.is_stale(clock())
    replica.in_flight = 2
    replica.polled(7, clock())
    replica.in_flight = 3
    assert replica.load(clock()) == 8
    clock.now += STALE_SECONDS + 0.1
    assert replica.load(clock()) == 3


def test_ejected_replicas_get_requests_only_where_no_other_is_left(table):
    table.put(endpoint_slice("s", {"a": "10.0.0.1", "b": "10.0.0.2"}))
    model = table.at((NAMESPACE, "tiny"))
    for _ in range(CONSECUTIVE_FAILURES):
        model.outliers.end("a", Verdict.FAILURE, model.replicas)
    assert [one.endpoint.uid for one in model.candidates(())] == ["b"]
    assert [one.endpoint.uid for one in model.candidates(("b",))] == ["a"]


def test_a_strategy_that_a_route_names_chooses_apart_and_what_peers_say_reaches_prefix(clock):
    table = ReplicaTable(
        (NAMESPACE,), 8001, clock, lambda strategy: router_for(strategy, random.Random(1), 7)
    )
    table.put(endpoint_slice("s", {uid: f"10.0.0.{number}" for number, uid in enumerate("abcdefgh", 1)}))
    model, facts = table.at((NAMESPACE, "tiny")), RequestFacts("tiny", ("user", "Python " * 1000))
    turns = model.router(Strategy("RoundRobin"))
    assert {turns.pick(facts, model.candidates(()), 0.0).replica.endpoint.uid for _ in range(8)} == {
        *"abcdefgh"
    }
    assert model.router(Strategy("RoundRobin")) is turns

    choice = model.router().pick(facts, model.candidates(()), 0.0)
    uid = next(one for one in "abcdefgh" if one != choice.replica.endpoint.uid)
    other = ReplicaTable(
        (NAMESPACE,), 8001, clock, lambda strategy: router_for(strategy, random.Random(2), 7)
    )
    other.put(endpoint_slice("s", {uid: "10.0.0.1", "z": "10.0.0.2"}))
    theirs = other.at((NAMESPACE, "tiny"))
    theirs.learn(uid, choice.digests)
    assert theirs.router().pick(facts, theirs.candidates(()), 0.0).replica.endpoint.uid == uid


def test_of_the_strategies_that_routes_have_had_few_are_kept_and_those_in_use_are(clock):
    table = ReplicaTable((NAMESPACE,), 8001, clock, lambda strategy: RoundRobin())
    table.put(endpoint_slice("s", {"a": "10.0.0.1"}))
    model = table.at((NAMESPACE, "tiny"))
    used = model.router(Strategy("Session", "x-used"))
    for number in range(50):
        model.router(Strategy("Session", f"x-{number}"))
        assert model.router(Strategy("Session", "x-used")) is used
