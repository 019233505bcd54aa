"""Prefill pods are given to an LLMDeployment that serves, and taken from it; its status says whether its
decode pods get prompts from them.

The writes of the Deployment controller and the kubelet are made by the tests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from e2e.operator import pods
from e2e.operator.statusz import statusz_server
from e2e.operator.world import BUDGET, World
from e2e.waiting import eventually
from quire_operator import names

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]

PREFILL = "m-prefill"
OF_PREFILL = ("Deployment", "Service", "NetworkPolicy", "HorizontalPodAutoscaler")


def serving(*, degraded: bool) -> dict[str, Any]:
    return {"phase": "serving", "transferDegraded": degraded}


def make_ready(world: World, namespace: str, name: str, ip: str) -> str:
    """A pod of the Deployment that is asked while it loads, and then becomes ready."""
    made = world.make_pod(namespace, name, pods.loading(ip=ip))["metadata"]["name"]
    world.patch("Pod", namespace, made, {"status": pods.ready()}, status=True)
    world.roll_out(namespace, name, ready=1)
    return str(made)


def roles(world: World, namespace: str) -> dict[str, tuple[int, int]]:
    """Ready and wanted pods by role."""
    found = world.status(namespace, "m").get("roles", [])
    return {role["name"]: (role["readyReplicas"], role["desiredReplicas"]) for role in found}


def test_prefill_pods_are_given_to_a_serving_deployment_and_taken_away_again(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m")
    eventually("all children", lambda: world.has_children(namespace, "m"))
    before = world.read("Deployment", namespace, "m")

    wanted = {"prefill": {"autoscaling": {"maxReplicas": 2}}}
    world.patch("LLMDeployment", namespace, "m", {"spec": {"disaggregation": wanted}})
    for kind in OF_PREFILL:
        eventually(f"{kind} of the prefill pods", partial(world.get, kind, namespace, PREFILL))
    assert world.get(BUDGET, namespace, PREFILL) is None, "it follows the first pod"
    world.make_pod(namespace, PREFILL, {"phase": "Pending"})
    eventually("their budget", lambda: world.get(BUDGET, namespace, PREFILL))
    decode = eventually(
        "decode pods that ask prefill pods",
        lambda: _with_role(world, namespace, "m", "kv_consumer"),
    )
    assert decode["metadata"]["uid"] == before["metadata"]["uid"], "it is updated, and not replaced"
    assert _with_role(world, namespace, PREFILL, "kv_producer")
    service = world.read("Service", namespace, PREFILL)
    assert service["spec"]["clusterIP"] == "None"
    assert world.read("Service", namespace, "m")["spec"]["selector"] == names.selector_labels("m")

    for pod in world.find("Pod", namespace, f"{names.LABEL_ROLE}={names.ROLE_PREFILL}"):
        world.delete("Pod", namespace, pod["metadata"]["name"])
    world.patch("LLMDeployment", namespace, "m", {"spec": {"disaggregation": None}})
    for kind in (*OF_PREFILL, BUDGET):
        eventually(f"no {kind} of prefill pods", partial(_is_gone, world, kind, namespace))
    eventually("pods without a role", lambda: _with_role(world, namespace, "m", ""))
    assert world.read("Deployment", namespace, "m")["metadata"]["uid"] == before["metadata"]["uid"]


def _is_gone(world: World, kind: str, namespace: str) -> bool:
    return world.get(kind, namespace, PREFILL) is None


def _with_role(world: World, namespace: str, name: str, role: str) -> dict[str, Any] | None:
    """The Deployment, if its pods have that --kv-role."""
    deployment = world.read("Deployment", namespace, name)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (source,) = container["envFrom"]
    data = world.read("ConfigMap", namespace, source["configMapRef"]["name"])["data"]
    return deployment if data.get("QUIRE_KV_ROLE", "") == role else None


def test_status_has_both_roles_and_says_when_decode_pods_compute_long_prompts_themselves(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", disaggregation={"prefill": {}})
    with (
        statusz_server(serving(degraded=False)) as decode,
        statusz_server(serving(degraded=False)) as prefill,
    ):
        make_ready(world, namespace, "m", decode.ip)
        world.wait_condition(namespace, "m", "Ready", "True")
        degraded = world.wait_condition(namespace, "m", "TransferDegraded", "True", "TransferDegraded")
        assert "no prefill pod is ready" in degraded["message"]
        assert roles(world, namespace) == {"decode": (1, 1), "prefill": (0, 1)}
        world.wait_condition(namespace, "m", "TransfersAuthenticated", "False", "TransfersUnauthenticated")
        world.wait_event(namespace, "m", "TransfersUnauthenticated")
        world.wait_event(namespace, "m", "TransferDegraded")

        make_ready(world, namespace, PREFILL, prefill.ip)
        world.wait_condition(namespace, "m", "TransferDegraded", "False", "AsExpected")
        world.wait_condition(namespace, "m", "RolloutComplete", "True")
        assert roles(world, namespace) == {"decode": (1, 1), "prefill": (1, 1)}

        decode.answer = serving(degraded=True)
        degraded = world.wait_condition(namespace, "m", "TransferDegraded", "True", "TransferDegraded")
        assert "1 of 1 decode pods" in degraded["message"]
        assert world.condition(namespace, "m", "Ready")["status"] == "True"

        decode.answer = serving(degraded=False)
        world.wait_condition(namespace, "m", "TransferDegraded", "False")
