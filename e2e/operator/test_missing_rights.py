"""The operator's rights are taken away for more than a minute: it stays up, and goes on where it was."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from e2e.operator.process import OperatorProcess
from e2e.operator.test_outage import OUTAGE_SECONDS
from e2e.operator.world import World, eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(240)]


@pytest.mark.chaos(
    2, fault=f"403: all rights gone for {OUTAGE_SECONDS} s", proof="a deleted child stays away"
)
def test_missing_rights_for_a_minute_are_survived(
    world: World, namespace: str, start: Callable[..., OperatorProcess]
) -> None:
    role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/quire-operator"
    rules = world.client.request("GET", role)["rules"]
    operator = start("forbidden").wait_leading(world)
    world.deploy(namespace, "m")
    eventually("all children", lambda: world.has_children(namespace, "m"))

    world.client.request("PATCH", role, {"rules": None}, "application/merge-patch+json")
    try:
        world.delete("Service", namespace, "m")
        until = time.monotonic() + OUTAGE_SECONDS
        while time.monotonic() < until:
            assert operator.code is None, operator.tail()
            time.sleep(1)
        assert world.get("Service", namespace, "m") is None, "the rights are gone"
    finally:
        world.client.request("PATCH", role, {"rules": rules}, "application/merge-patch+json")

    eventually("the Service is back", lambda: world.get("Service", namespace, "m"), seconds=30)
    assert operator.code is None
