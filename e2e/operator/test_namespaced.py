"""With watchNamespaces the operator works in these, with Roles alone, and leaves others unchanged; nothing
feeds an autoscaler there, which it says.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from e2e.cluster.apiserver import ApiServer
from e2e.operator import controllers, rights
from e2e.operator.process import OperatorProcess
from e2e.operator.world import Body, World
from e2e.waiting import eventually

pytestmark = pytest.mark.api


def env_of(deployment: Body) -> dict[str, str]:
    """What the chart tells the operator about namespaces and the metrics adapter."""
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    return {name: given[name] for name in ("QUIRE_WATCH_NAMESPACES", "QUIRE_LOAD_URL")}


def lacks_adapter(world: World, name: str) -> bool:
    found = world.condition("team-a", name, "ScalingActive")
    return (found["status"], found["reason"]) == ("False", "MetricsAdapterMissing")


def test_a_namespaced_operator_needs_no_cluster_role(server: ApiServer, world: World, tmp_path: Path) -> None:
    for name in ("team-a", "team-b", "team-c"):
        world.namespace(name)
        world.deploy(name, "before")
    rendered = rights.rendered_chart("--set", "watchNamespaces={team-a,team-b}", release="narrow")
    rights.install(world, [body for body in rendered if not body["kind"].startswith("Cluster")])
    (environ,) = [env_of(body) for body in rendered if body["kind"] == "Deployment"]
    kubeconfig = rights.token_kubeconfig(server, world, "narrow-operator", tmp_path / "kubeconfig")

    operator = OperatorProcess("narrow", kubeconfig, tmp_path, **environ).start()
    try:
        operator.wait_leading(world)
        for name in ("team-a", "team-b"):
            world.deploy(name, "after")
            for llm in ("before", "after"):
                eventually(
                    f"{name}/{llm} has its children",
                    partial(world.has_children, name, llm),
                )
        world.delete("Service", "team-a", "after")
        eventually("the Service is back", lambda: world.get("Service", "team-a", "after"))
        world.deploy("team-a", "scaled", autoscaling={"maxReplicas": 4})
        with controllers.running(server, "horizontal-pod-autoscaler-controller"):
            eventually("the autoscaler lacks metrics", lambda: lacks_adapter(world, "scaled"))
        world.wait_event("team-a", "scaled", "MetricsAdapterMissing")
    finally:
        operator.stop()

    assert world.get("Service", "team-c", "before") is None
    assert "Forbidden" not in operator.tail() and "WARNING" not in operator.tail(), operator.tail()
