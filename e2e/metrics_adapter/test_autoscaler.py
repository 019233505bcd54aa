"""A real HorizontalPodAutoscaler scales by the adapter's values, and does nothing without one."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.metrics_adapter.cluster import Cluster
from e2e.metrics_adapter.engines import says
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("adapter")]

AUTOSCALERS = "/apis/autoscaling/v2/namespaces/{}/horizontalpodautoscalers"


def test_an_hpa_follows_the_queue_depth_and_keeps_its_replicas_while_it_is_unknown(
    cluster: Cluster, namespace: str
) -> None:
    engine = cluster.engine(namespace, "chat", says(queue=10))
    cluster.wait_value(namespace, "chat", "10")
    _deploy(cluster, namespace)

    engine.answer = says(queue=35)
    eventually("four replicas", lambda: _replicas(cluster, namespace) == 4)
    engine.answer = lambda: (503, b"")
    cluster.wait_refusal(namespace, "chat", "did not answer")
    eventually(
        "it says why",
        lambda: _condition(cluster, namespace, "ScalingActive").get("reason") == "FailedGetObjectMetric",
    )
    assert _replicas(cluster, namespace) == 4
    engine.answer = says(queue=0)
    eventually("one replica", lambda: _replicas(cluster, namespace) == 1)


def _deploy(cluster: Cluster, namespace: str) -> None:
    cluster.world.roll_out(namespace, "chat", ready=1)
    described = {"apiVersion": "serving.quire.dev/v1alpha1", "kind": "LLMDeployment", "name": "chat"}
    target = {"type": "AverageValue", "averageValue": "10"}
    metric = {"metric": {"name": "llm_queue_depth"}, "describedObject": described, "target": target}
    body = {
        "metadata": {"name": "chat"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat"},
            "minReplicas": 1,
            "maxReplicas": 8,
            "metrics": [{"type": "Object", "object": metric}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }
    cluster.world.client.request("POST", AUTOSCALERS.format(namespace), body)


def _replicas(cluster: Cluster, namespace: str) -> int:
    deployment = cluster.world.read("Deployment", namespace, "chat")
    wanted = int(deployment["spec"]["replicas"])
    if deployment["status"].get("replicas") != wanted:  # there is no controller that would
        cluster.world.roll_out(namespace, "chat", ready=wanted)
    return wanted


def _condition(cluster: Cluster, namespace: str, kind: str) -> dict[str, Any]:
    autoscaler = cluster.world.client.request("GET", f"{AUTOSCALERS.format(namespace)}/chat")
    conditions = autoscaler.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {})
