"""The operator lacks rights: all of them for more than a minute, or those that few LLMDeployments need."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from e2e.operator.process import OperatorProcess
from e2e.operator.test_outage import OUTAGE_SECONDS
from e2e.operator.world import MERGE, World
from e2e.waiting import eventually

ROLE = "/apis/rbac.authorization.k8s.io/v1/clusterroles/quire-operator"
NEWER = ("jobs", "inferencepools")  # as with the role of an older release without downloads and routes
CACHE = {"mode": "SharedPVC", "size": "1Gi"}

pytestmark = [pytest.mark.api, pytest.mark.timeout(240)]


@pytest.mark.deep
@pytest.mark.chaos(
    2, fault=f"403: all rights gone for {OUTAGE_SECONDS} s", proof="a deleted child stays away"
)
def test_the_operator_survives_a_minute_without_rights(
    world: World, namespace: str, start: Callable[..., OperatorProcess]
) -> None:
    rules = world.client.request("GET", ROLE)["rules"]
    operator = start("forbidden").wait_leading(world)
    world.deploy(namespace, "m")
    eventually("all children", lambda: world.has_children(namespace, "m"))

    world.client.request("PATCH", ROLE, {"rules": None}, MERGE)
    try:
        world.delete("Service", namespace, "m")
        until = time.monotonic() + OUTAGE_SECONDS
        while time.monotonic() < until:
            assert operator.code is None, operator.tail()
            time.sleep(1)
        assert world.get("Service", namespace, "m") is None, "the rights are gone"
    finally:
        world.client.request("PATCH", ROLE, {"rules": rules}, MERGE)

    eventually("the Service is back", lambda: world.get("Service", namespace, "m"))
    assert operator.code is None


def test_with_an_older_role_only_llmdeployments_that_need_the_missing_rights_wait(
    world: World, namespace: str, start: Callable[..., OperatorProcess]
) -> None:
    rules = world.client.request("GET", ROLE)["rules"]
    older = [rule for rule in rules if not set(rule["resources"]) & set(NEWER)]
    assert len(older) == len(rules) - len(NEWER)
    world.client.request("PATCH", ROLE, {"rules": older}, MERGE)
    try:
        operator = start("older").wait_leading(world)
        world.deploy(namespace, "m")
        eventually("all children", lambda: world.has_children(namespace, "m"))
        source = {"huggingFace": {"repo": "org/m"}}
        world.deploy(namespace, "fetched", model={"source": source}, cache=CACHE)
        reported = world.wait_condition(namespace, "fetched", "Ready", "False", "MissingRights")
        assert "resources: [jobs], verbs: [get, list, watch, create, patch, delete]" in reported["message"]
        world.wait_events(namespace, "fetched", "MissingRights")
        assert operator.ask("/healthz")[0] == 200
    finally:
        world.client.request("PATCH", ROLE, {"rules": rules}, MERGE)

    eventually("the Job", lambda: world.child("Job", namespace, "fetched"))
    log = operator.log.read_text(encoding="utf-8")
    for kind in ("Job", "InferencePool"):
        assert log.count(f"LLMDeployments that need a {kind} have to wait") == 1
    assert "APIForbiddenError" not in log
