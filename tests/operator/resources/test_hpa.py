"""The HorizontalPodAutoscaler has the targets of the spec, in the terms of Kubernetes."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.api import specs
from quire_operator import resources, spec
from quire_operator.resources import PodMeasurements
from quire_operator.settings import Settings

SETTINGS = Settings(engine_image="registry.example/quire-server:1")


def autoscaler(*, engine: Any = None, measured: Any = None, **fields: Any) -> specs.Body:
    body = specs.minimal(autoscaling={"maxReplicas": 4, **fields}, engine=engine or {}, resources={"gpu": {}})
    children = resources.build(spec.parse(body), SETTINGS, PodMeasurements(**(measured or {})))
    (found,) = [child for child in children if child["kind"] == "HorizontalPodAutoscaler"]
    inner: specs.Body = found["spec"]
    return inner


def targets(found: specs.Body) -> dict[str, str]:
    return {
        metric["object"]["metric"]["name"]: metric["object"]["target"]["averageValue"]
        for metric in found["metrics"]
    }


@pytest.mark.parametrize(
    ("fields", "exists"),
    [
        ({}, False),
        ({"replicas": 3}, False),
        ({"autoscaling": {"maxReplicas": 4}}, True),
        ({"autoscaling": {"maxReplicas": 4, "backend": "HPA"}}, True),
        ({"autoscaling": {"maxReplicas": 4, "backend": "External"}}, False),
        ({"autoscaling": {"maxReplicas": 4, "backend": "KEDA"}}, False),
        ({"autoscaling": {"maxReplicas": 4}, "suspend": True}, False),
    ],
)
def test_there_is_one_where_the_operator_is_to_make_one(fields: dict[str, Any], exists: bool) -> None:
    children = resources.build(spec.parse(specs.minimal(**fields)), SETTINGS)
    assert any(child["kind"] == "HorizontalPodAutoscaler" for child in children) == exists


def test_it_scales_the_deployment_by_sums_over_the_llmdeployment() -> None:
    found = autoscaler()

    assert found["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "minimal"}
    described = {"apiVersion": "serving.quire.dev/v1alpha1", "kind": "LLMDeployment", "name": "minimal"}
    for metric in found["metrics"]:
        assert (metric["type"], metric["object"]["describedObject"]) == ("Object", described)
        assert metric["object"]["target"]["type"] == "AverageValue", "a Value would compound while pods load"
    assert (found["minReplicas"], found["maxReplicas"]) == (1, 4)


def test_without_metrics_the_queue_and_the_running_requests_count() -> None:
    assert targets(autoscaler()) == {"llm_queue_depth": "10", "llm_running_requests": "48"}
    batch = autoscaler(engine={"maxNumSeqs": 1})
    assert targets(batch)["llm_running_requests"] == "1"


@pytest.mark.parametrize(
    ("kind", "target", "name", "quantity"),
    [
        ("QueueDepth", None, "llm_queue_depth", "10"),
        ("QueueDepth", 1500, "llm_queue_depth", "1500"),
        ("QueueDepth", 2000, "llm_queue_depth", "2k"),
        ("RunningRequests", 7, "llm_running_requests", "7"),
        ("KVCacheUtilization", None, "llm_kv_cache_utilization", "800m"),
        ("GPUUtilization", None, "llm_gpu_utilization", "800m"),
        ("GPUUtilization", 5, "llm_gpu_utilization", "50m"),
        ("GPUUtilization", 100, "llm_gpu_utilization", "1"),
    ],
)
def test_a_target_is_spelt_as_the_api_server_spells_it(
    kind: str, target: int | None, name: str, quantity: str
) -> None:
    metric = {"type": kind} | ({} if target is None else {"targetPerReplica": target})
    assert targets(autoscaler(metrics=[metric])) == {name: quantity}


@pytest.mark.parametrize(
    ("load", "period"), [(None, 60), (0, 15), (15, 15), (16, 30), (214, 240), (1801, 1800), (86_400, 1800)]
)
def test_it_grows_once_in_the_time_of_a_load(load: int | None, period: int) -> None:
    up = autoscaler(measured={"load_seconds": load})["behavior"]["scaleUp"]
    assert {policy["periodSeconds"] for policy in up["policies"]} == {period}
    assert {policy["type"]: policy["value"] for policy in up["policies"]} == {"Pods": 1, "Percent": 50}


def test_what_the_user_says_about_the_pace_is_taken() -> None:
    behavior = autoscaler(
        measured={"load_seconds": 214},
        behavior={
            "scaleUp": {"periodSeconds": 20, "pods": 3, "percent": 0, "stabilizationWindowSeconds": 5},
            "scaleDown": {"periodSeconds": 30, "pods": 2, "stabilizationWindowSeconds": 0},
        },
    )["behavior"]

    assert behavior["scaleUp"]["policies"] == [{"type": "Pods", "value": 3, "periodSeconds": 20}]
    assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 5
    assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 2, "periodSeconds": 30}]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 0


GPU = [{"type": "GPUUtilization"}]


@pytest.mark.parametrize(
    ("metrics", "percent", "scale_down_disabled", "policy"),
    [
        (GPU, None, False, "Disabled"),
        (GPU, 29.9, True, "Max"),
        (GPU, 29.9, False, "Max"),
        (GPU, 30, True, "Disabled"),
        (GPU, 32, False, "Max"),
        (GPU, 33.1, False, "Disabled"),
        (GPU, 90, True, "Disabled"),
        ([{"type": "GPUUtilization", "targetPerReplica": 40}], 16, True, "Disabled"),
        ([{"type": "GPUUtilization", "targetPerReplica": 40}], 14, True, "Max"),
        ([{"type": "QueueDepth"}], 90, True, "Max"),
        ([], None, False, "Max"),
    ],
)
def test_gpus_that_work_are_kept_below_their_target_too(
    metrics: list[Any], percent: float | None, scale_down_disabled: bool, policy: str
) -> None:
    """80 percent ask for more, 30 for fewer."""
    found = autoscaler(
        metrics=metrics, measured={"gpu_percent": percent, "scale_down_disabled": scale_down_disabled}
    )
    assert found["behavior"]["scaleDown"]["selectPolicy"] == policy
    assert found["behavior"]["scaleUp"]["selectPolicy"] == "Max"


def test_it_shrinks_slowly_by_default() -> None:
    down = autoscaler()["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] == 300
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]
