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
def test_an_hpa_is_rendered_only_for_backend_auto_or_hpa_without_suspension(
    fields: dict[str, Any], exists: bool
) -> None:
    children = resources.build(spec.parse(specs.minimal(**fields)), SETTINGS)
    assert any(child["kind"] == "HorizontalPodAutoscaler" for child in children) == exists


def test_the_hpa_scales_the_deployment_by_object_metrics_of_the_llmdeployment() -> None:
    found = autoscaler()

    assert found["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "minimal"}
    described = {"apiVersion": "serving.quire.dev/v1alpha1", "kind": "LLMDeployment", "name": "minimal"}
    for metric in found["metrics"]:
        assert (metric["type"], metric["object"]["describedObject"]) == ("Object", described)
        assert metric["object"]["target"]["type"] == "AverageValue", "a Value would compound while pods load"
    assert (found["minReplicas"], found["maxReplicas"]) == (1, 4)


def test_the_default_metrics_are_queue_depth_and_running_requests() -> None:
    assert targets(autoscaler()) == {"llm_queue_depth": "10", "llm_running_requests": "192"}
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
def test_a_target_is_written_in_the_canonical_form_of_the_api_server(
    kind: str, target: int | None, name: str, quantity: str
) -> None:
    metric = {"type": kind} | ({} if target is None else {"targetPerReplica": target})
    assert targets(autoscaler(metrics=[metric])) == {name: quantity}


@pytest.mark.parametrize(
    ("load", "period"), [(None, 60), (0, 15), (15, 15), (16, 30), (214, 240), (1801, 1800), (86_400, 1800)]
)
def test_scale_up_takes_one_step_per_model_load_time(load: int | None, period: int) -> None:
    up = autoscaler(measured={"load_seconds": load})["behavior"]["scaleUp"]
    assert {policy["periodSeconds"] for policy in up["policies"]} == {period}
    assert {policy["type"]: policy["value"] for policy in up["policies"]} == {"Pods": 1, "Percent": 50}


def test_behavior_in_the_spec_overrides_the_derived_scaling_policies() -> None:
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
def test_scale_down_is_disabled_while_gpu_utilization_is_unknown_or_not_far_below_its_target(
    metrics: list[Any], percent: float | None, scale_down_disabled: bool, policy: str
) -> None:
    """80 percent ask for more, 30 for fewer."""
    found = autoscaler(
        metrics=metrics, measured={"gpu_percent": percent, "scale_down_disabled": scale_down_disabled}
    )
    assert found["behavior"]["scaleDown"]["selectPolicy"] == policy
    assert found["behavior"]["scaleUp"]["selectPolicy"] == "Max"


def test_the_default_scale_down_is_one_pod_a_minute_after_five_minutes() -> None:
    down = autoscaler()["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] == 300
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]
