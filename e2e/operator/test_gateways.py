"""An HTTPRoute is created where the spec names a Gateway; its CRDs may be installed later, removed, or come
from others.

No Gateway runs here: the tests write its status. The real API server validates with the schemas of the CRDs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.api.client import RefusedError
from e2e.cluster import crds
from e2e.operator.world import Body, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator"), pytest.mark.timeout(120)]

GATEWAY = {"name": "shared", "namespace": "gateways"}
ROUTE: Body = {"parentRefs": [GATEWAY], "hostnames": ["m.example"], "path": "/m"}
POOL: Body = {"endpointPickerRef": {"name": "picker"}}


@pytest.fixture
def installed(world: World) -> Iterator[None]:
    """With the CRDs installed while the block runs."""
    for module in (crds.HTTP_ROUTE, crds.INFERENCE_POOL):
        world.client.install_crd(crds.crd(module))
    yield
    for kind in ("HTTPRoute", "InferencePool"):
        world.uninstall(kind)


def answered(world: World, namespace: str, **conditions: str) -> None:
    """The status that a Gateway's controller writes to the route."""
    reported = [
        {
            "type": kind,
            "status": text.split()[0],
            "reason": text.split()[1],
            "message": "its words",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        for kind, text in conditions.items()
    ]
    parent = {"parentRef": GATEWAY, "controllerName": "example.com/g", "conditions": reported}
    world.patch("HTTPRoute", namespace, "m", {"status": {"parents": [parent]}}, status=True)


def networking(world: World, namespace: str, **fields: Any) -> None:
    world.patch("LLMDeployment", namespace, "m", {"spec": {"networking": fields}})


def test_gateway_crds_installed_later_are_used_without_a_restart_and_unset_fields_delete_routes(
    world: World, namespace: str, request: pytest.FixtureRequest
) -> None:
    world.deploy(namespace, "m", networking={"httpRoute": ROUTE, "inferencePool": POOL})
    missing = world.wait_condition(namespace, "m", "Routed", "False", "MissingCRD")
    assert "HTTPRoute and InferencePool" in missing["message"]
    eventually("all other children", lambda: world.has_children(namespace, "m"))
    world.wait_events(namespace, "m", "MissingCRD")
    template = world.read("Deployment", namespace, "m")["spec"]["template"]

    request.getfixturevalue("installed")
    route = eventually("the route", lambda: world.get("HTTPRoute", namespace, "m"))
    pool = eventually("the pool", lambda: world.get("InferencePool", namespace, "m"))
    backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "m", "weight": 1}
    assert route["spec"]["rules"][0]["backendRefs"] == [backend]
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    world.wait_condition(namespace, "m", "Routed", "Unknown", "AwaitingGateway")

    networking(world, namespace, inferencePool=None)
    eventually("the pool is gone", lambda: world.get("InferencePool", namespace, "m") is None)
    backend = world.read("HTTPRoute", namespace, "m")["spec"]["rules"][0]["backendRefs"][0]
    assert (backend["kind"], backend["port"]) == ("Service", 80)
    networking(world, namespace, httpRoute=None)
    eventually("the route is gone", lambda: world.get("HTTPRoute", namespace, "m") is None)
    eventually("nothing is said of it", lambda: not world.condition(namespace, "m", "Routed")["status"])
    assert world.read("Deployment", namespace, "m")["spec"]["template"] == template


@pytest.mark.usefixtures("installed")
def test_the_routed_condition_follows_the_gateway_and_an_edited_route_is_repaired(
    world: World, namespace: str
) -> None:
    for wrong in ([], [GATEWAY, {**GATEWAY, "sectionName": "https"}]):
        with pytest.raises(RefusedError, match="parentRefs"):
            world.deploy(namespace, "m", networking={"httpRoute": {"parentRefs": wrong}})
    by_name = {**ROUTE, "modelHeader": "X-Gateway-Model-Name"}
    world.deploy(namespace, "m", networking={"httpRoute": by_name})
    eventually("the route", lambda: world.get("HTTPRoute", namespace, "m"))
    answered(world, namespace, Accepted="False NotAllowedByListeners")
    world.wait_condition(namespace, "m", "Routed", "False", "RouteNotAccepted")
    world.wait_event(namespace, "m", "RouteNotAccepted")
    answered(world, namespace, Accepted="True Accepted", ResolvedRefs="True ResolvedRefs")
    world.wait_condition(namespace, "m", "Routed", "True", "RouteAccepted")

    world.patch("HTTPRoute", namespace, "m", {"spec": {"hostnames": ["stolen.example"]}})
    networking(world, namespace, networkPolicy={"mode": "None"})
    eventually(
        "mended", lambda: world.read("HTTPRoute", namespace, "m")["spec"]["hostnames"] == ["m.example"]
    )
    writes = world.writes()[f"patch httproutes {namespace}/m"]
    networking(world, namespace, networkPolicy={"mode": "Restricted"})
    eventually("the policy is back", lambda: world.get("NetworkPolicy", namespace, "m"))
    assert world.writes()[f"patch httproutes {namespace}/m"] == writes == 2, "what is right is not written"
