"""Which gateways count as running, and what status says of routes and clients."""

import calendar

import pytest

from quire_gateway.gateway_leases import DURATION_SECONDS, GatewayLeases, lease
from quire_gateway.object_status import client_conditions, external_conditions, route_conditions, status
from quire_gateway.routing_table import resolve
from tests.gateway.kube_stub import NAMESPACE, llm_object

NOW = "2026-02-02T00:00:00Z"
SECONDS = calendar.timegm((2026, 2, 2, 0, 0, 0))
TINY = (NAMESPACE, "tiny")


def route(**spec):
    rules = [{"targets": [{"deployment": "tiny"}, {"deployment": "next"}]}]
    return llm_object("LLMRoute", "r", {"models": ["chat"], "rules": rules, **spec}, generation=3)


def reasons(body, known=(), ready=()):
    found = route_conditions(body, resolve([body], [], []), known, ready)
    return {kind: reason if holds else f"not: {reason}" for kind, holds, reason, _ in found}


@pytest.mark.parametrize(
    ("body", "known", "ready", "expected"),
    [
        (route(), (TINY,), (TINY,), ("Accepted", "not: DeploymentNotFound", "Ready")),
        (route(), (TINY, (NAMESPACE, "next")), (), ("Accepted", "ResolvedRefs", "not: NoReplica")),
        (
            route(killSwitch={"enabled": True}),
            (TINY, (NAMESPACE, "next")),
            (TINY,),
            ("Accepted", "ResolvedRefs", "not: KillSwitch"),
        ),
    ],
)
def test_conditions_say_what_is_wrong_with_a_route(body, known, ready, expected):
    assert reasons(body, known, ready) == dict(
        zip(("Accepted", "ResolvedRefs", "Ready"), expected, strict=True)
    )


def test_a_route_to_outside_is_resolved_and_ready_when_its_backend_exists():
    spec = {"baseURL": "https://a.example.com", "model": "m"}
    backend = llm_object("LLMExternalBackend", "outside", spec)
    body = route(rules=[{"targets": [{"external": "outside"}]}])
    for externals, expected in (
        ([], ("not: ExternalBackendNotFound", "not: NoReplica")),
        (
            [backend],
            ("ResolvedRefs", "Ready"),
        ),
    ):
        found = route_conditions(body, resolve([body], [], [], externals), (), ())
        assert tuple(reason if holds else f"not: {reason}" for _, holds, reason, _ in found[1:]) == expected


def test_conditions_say_what_is_wrong_with_a_backend():
    def found(body, problem=None):
        table = resolve([], [], [], [body])
        conditions = external_conditions(body, table, lambda _: problem)
        return {kind: (holds, reason) for kind, holds, reason, _ in conditions}

    spec = {"baseURL": "https://a.example.com", "model": "m"}
    body = llm_object("LLMExternalBackend", "outside", spec)
    assert found(body)["Ready"] == (True, "Ready")
    missing = ("SecretNotMounted", "no file")
    assert (
        found(body, missing)["ResolvedRefs"] == found(body, missing)["Ready"] == (False, "SecretNotMounted")
    )
    unread = llm_object("LLMExternalBackend", "outside", {**spec, "baseURL": "file:///etc"})
    assert found(unread) == {"Accepted": (False, "Unreadable"), "Ready": (False, "Unreadable")}


def test_a_route_that_cannot_be_read_says_so():
    assert reasons(route(models=3)) == {"Accepted": "not: Unreadable", "Ready": "not: Unreadable"}


def test_a_client_that_cannot_be_read_has_no_key_and_says_so():
    body = llm_object("LLMClient", "c", {"keyHashes": ["0" * 64], "budget": {"tokens": "many"}})
    table = resolve([], [body], [])
    assert not table.clients
    assert client_conditions(body, table, SECONDS)[0][:3] == ("Accepted", False, "Unreadable")


def test_a_client_whose_requests_are_refused_is_not_ready_and_says_why():
    def ready(**spec):
        body = llm_object("LLMClient", "c", {"keyHashes": ["0" * 64], **spec})
        body["status"] = {"usage": {"period": "2026-02", "promptTokens": 60, "completionTokens": 40}}
        (*_, last) = client_conditions(body, resolve([], [body], []), SECONDS)
        return last[1:3]

    assert ready() == (True, "Ready")
    assert ready(suspended=True) == (False, "Suspended")
    assert ready(keyHashes=[]) == (False, "NoKey")
    assert ready(budget={"tokens": 101}) == ready(budget={"tokens": 1, "period": "Day"}) == (True, "Ready")
    assert ready(budget={"tokens": 100}) == (False, "BudgetSpent")


def test_a_gateway_has_applied_a_spec_when_it_uses_this_generation_of_this_object():
    gateways = {"a": {"uid-r": 3}, "b": {"uid-r": 2}, "c": {"uid-other": 9}}
    assert status(route(), [], gateways, NOW)["gateways"] == {"seen": 3, "applied": 1}


def test_a_condition_keeps_its_time_until_its_status_changes():
    body = route()
    body["status"] = status(body, [("Ready", True, "Ready", "")], {}, NOW)
    assert (
        status(body, [("Ready", True, "Other", "")], {}, "later")["conditions"][0]["lastTransitionTime"]
        == NOW
    )
    later = status(body, [("Ready", False, "NoReplica", "")], {}, "later")["conditions"][0]
    assert later["lastTransitionTime"] == "later"


def test_a_gateway_counts_until_its_lease_is_not_renewed_for_its_duration_by_our_clock(clock):
    leases = GatewayLeases(lambda: None, clock)
    leases.replace([lease("a", {"u": 1}, "1"), lease("b", {}, "1")], NAMESPACE)
    clock.now += DURATION_SECONDS - 1
    leases.put(lease("a", {"u": 2}, "2"))
    leases.replace([lease("a", {"u": 2}, "2"), lease("b", {}, "1")], NAMESPACE)
    assert set(leases.live()) == {"a", "b"}
    clock.now += 1
    assert leases.live() == {"a": {"u": 2}}
    leases.remove(lease("a", {}, "2"))
    assert leases.live() == {}


@pytest.mark.parametrize("applied", ["[", "[1]", '{"u": "one"}', '{"u": null}'])
def test_a_lease_without_readable_generations_is_a_gateway_that_has_applied_nothing(clock, applied):
    leases = GatewayLeases(lambda: None, clock)
    annotations = {"serving.quire.dev/applied": applied}
    leases.put({"metadata": {"name": "odd", "annotations": annotations}, "spec": {}})
    assert leases.live() == {"odd": {}}
