"""The program that evaluates NetworkPolicies: by small policies whose meaning the API documents."""

from __future__ import annotations

from typing import Any

import pytest

from tests.network_policies import reachability
from tests.network_policies.reachability import NODE, Body, Connection, World

NAMESPACES: dict[str, dict[str, str]] = {"a": {}, "b": {"team": "b"}}
SERVER: Body = {
    "metadata": {"labels": {"app": "server"}},
    "spec": {
        "containers": [{"name": "c", "ports": [{"name": "web", "containerPort": 8000, "protocol": "TCP"}]}]
    },
}
PODS = (
    reachability.pod("a/server", SERVER),
    reachability.pod("a/client", app="client"),
    reachability.pod("b/client", app="client"),
    reachability.pod("b/other", app="other"),
)
WEB = {"protocol": "TCP", "port": "web"}
TEAM_B = {"namespaceSelector": {"matchLabels": {"team": "b"}}}
CLIENTS = {"podSelector": {"matchLabels": {"app": "client"}}}
NEAR = {"cidr": "192.0.2.0/24", "except": ["192.0.2.128/25"]}
ALL = ["a/client", "b/client", "b/other", "192.0.2.1", "192.0.2.200", "2001:db8::1", NODE]

# Rules of ingress for a/server, and who of ALL may connect to its port 8000.
RULES: dict[str, tuple[list[Body], list[str]]] = {
    "no rule": ([], [NODE]),
    "an empty rule": ([{}], ALL),
    "another port": ([{"ports": [{"protocol": "TCP", "port": 8001}]}], [NODE]),
    "another protocol": ([{"ports": [{"protocol": "UDP", "port": 8000}]}], [NODE]),
    "a range": ([{"ports": [{"protocol": "TCP", "port": 7990, "endPort": 8000}]}], ALL),
    "a range below": ([{"ports": [{"protocol": "TCP", "port": 7990, "endPort": 7999}]}], [NODE]),
    "the port's name": ([{"ports": [WEB]}], ALL),
    "pods here": ([{"from": [{"podSelector": {}}]}], ["a/client", NODE]),
    "pods anywhere": ([{"from": [{"namespaceSelector": {}}]}], ["a/client", "b/client", "b/other", NODE]),
    "a namespace and pods in it": ([{"from": [{**TEAM_B, **CLIENTS}]}], ["b/client", NODE]),
    "a namespace, and pods here": ([{"from": [TEAM_B, CLIENTS]}], ["a/client", "b/client", "b/other", NODE]),
    "addresses": ([{"from": [{"ipBlock": NEAR}]}], ["192.0.2.1", NODE]),
    "addresses of IPv6": ([{"from": [{"ipBlock": {"cidr": "2001:db8::/64"}}]}], ["2001:db8::1", NODE]),
}


def policy(**spec: Any) -> Body:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "p", "namespace": "a"},
        "spec": {"podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"], **spec},
    }


def world(*policies: Body) -> World:
    return World(NAMESPACES, PODS, policies)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_admits_exactly_whom_the_api_says(name: str) -> None:
    rules, expected = RULES[name]
    asked = [Connection(one, "a/server", 8000) for one in ALL]
    denied = reachability.deniers(world(policy(ingress=rules)), asked)
    assert [one.source for one in asked if not denied[one]] == expected


def test_policies_are_of_their_namespace_and_direction_and_add_up() -> None:
    here, there, out = (
        Connection("b/other", "a/server", 8000),
        Connection("a/server", "b/other", 8000),
        Connection("a/server", "192.0.2.1", 443),
    )
    egress = policy(policyTypes=["Egress"], egress=[{"to": [TEAM_B]}])
    elsewhere = {**policy(podSelector={}), "metadata": {"name": "p", "namespace": "b"}}
    assert reachability.deniers(world(elsewhere, egress), [here, there, out]) == {
        here: [],
        there: ["ingress of b/other"],
        out: ["egress of a/server"],
    }
    assert reachability.deniers(world(policy(), policy(ingress=[{}])), [here]) == {here: []}


@pytest.mark.parametrize(
    ("policies", "connection", "said"),
    [
        ((), Connection("a/nobody", "a/server", 1), "there is no pod a/nobody"),
        ((), Connection("server", "a/server", 1), "server"),
        ((policy(ingres=[]),), Connection("a/client", "a/server", 1), "ingres"),
        (
            (policy(podSelector={"matchExpressions": [{"key": "x", "operator": "NotIn", "values": ["y"]}]}),),
            Connection("a/client", "a/server", 1),
            "NotIn",
        ),
    ],
    ids=["no such pod", "no address", "a misspelt field", "an operator that the engine gets wrong"],
)
def test_what_cannot_be_judged_is_refused(
    policies: tuple[Body, ...], connection: Connection, said: str
) -> None:
    done = reachability.run(reachability.question(world(*policies), [connection]))
    assert done.returncode == 1
    assert said in done.stderr
