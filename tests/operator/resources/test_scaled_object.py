"""The ScaledObject has the targets of the spec, read from the metrics adapter, in the terms of KEDA."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.api import specs
from quire_operator import resources, spec
from quire_operator.errors import SpecError
from quire_operator.resources import PodMeasurements
from quire_operator.settings import Settings

SETTINGS = Settings(
    engine_image="registry.example/quire-server:1", load_url="http://adapter.ops.svc:8080/load"
)


def children(settings: Settings = SETTINGS, **fields: Any) -> list[specs.Body]:
    body = specs.minimal(autoscaling={"maxReplicas": 4, **fields}, resources={"gpu": {}})
    return list(resources.build(spec.parse(body), settings, PodMeasurements(load_seconds=100)))


def scaled_object(**fields: Any) -> specs.Body:
    (found,) = [child for child in children(**fields) if child["kind"] == "ScaledObject"]
    inner: specs.Body = found["spec"]
    return inner


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "HorizontalPodAutoscaler"),
        ({"backend": "KEDA"}, "ScaledObject"),
        ({"idle": {}}, "HorizontalPodAutoscaler"),
        ({"minReplicas": 0}, "HorizontalPodAutoscaler"),
        ({"idle": {"activator": {"scalerAddress": "holder.ns:9090"}}}, "ScaledObject"),
        ({"fallback": {"replicas": 2}}, "ScaledObject"),
        ({"backend": "HPA"}, "HorizontalPodAutoscaler"),
        ({"backend": "External"}, None),
    ],
)
def test_backend_auto_selects_keda_only_for_features_that_only_keda_has(
    fields: dict[str, Any], kind: str | None
) -> None:
    found = {child["kind"] for child in children(**fields)} & {"HorizontalPodAutoscaler", "ScaledObject"}
    assert found == ({kind} if kind else set())


def test_each_metric_is_a_trigger_with_a_url_of_the_metrics_adapter() -> None:
    metrics = [{"type": "QueueDepth", "targetPerReplica": 4}, {"type": "KVCacheUtilization"}]
    found = scaled_object(backend="KEDA", metrics=metrics)

    urls = {trigger["metadata"]["url"]: trigger["metadata"]["targetValue"] for trigger in found["triggers"]}
    assert urls == {
        "http://adapter.ops.svc:8080/load/default/minimal/llm_queue_depth": "4",
        "http://adapter.ops.svc:8080/load/default/minimal/llm_kv_cache_utilization": "0.8",
    }
    assert {t["metricType"] for t in found["triggers"]} == {"AverageValue"}, "a Value would compound"
    assert "idleReplicaCount" not in found and "fallback" not in found


def test_the_scaled_object_has_the_same_scaling_behavior_as_the_hpa() -> None:
    hpa = next(c for c in children(backend="HPA") if c["kind"] == "HorizontalPodAutoscaler")
    advanced = scaled_object(backend="KEDA")["advanced"]["horizontalPodAutoscalerConfig"]
    assert advanced["behavior"] == hpa["spec"]["behavior"]


def test_only_a_model_that_may_scale_to_zero_reports_no_pods_as_zero_load() -> None:
    awake, sleepy = scaled_object(backend="KEDA"), scaled_object(backend="KEDA", idle={"afterSeconds": 60})

    assert not any("ifNone" in trigger["metadata"]["url"] for trigger in awake["triggers"])
    assert all(trigger["metadata"]["url"].endswith("?ifNone=0") for trigger in sleepy["triggers"])
    assert (sleepy["idleReplicaCount"], sleepy["cooldownPeriod"]) == (0, 60)
    assert scaled_object(backend="KEDA", minReplicas=0) == scaled_object(backend="KEDA", idle={})


def test_the_activator_becomes_an_external_push_trigger() -> None:
    reported = {"httpScaledObject": "chat", "scalerAddress": "elsewhere:1"}
    found = scaled_object(idle={"activator": {"scalerAddress": "holder.ns:9090", "metadata": reported}})

    assert found["triggers"][-1] == {
        "type": "external-push",
        "name": "Activator",
        "metadata": {"httpScaledObject": "chat", "scalerAddress": "holder.ns:9090"},
    }


def test_the_fallback_never_scales_down() -> None:
    found = scaled_object(fallback={"replicas": 3, "failureThreshold": 5})["fallback"]
    assert found == {"replicas": 3, "failureThreshold": 5, "behavior": "currentReplicasIfHigher"}


def test_without_the_metrics_adapter_keda_is_refused_with_a_remedy() -> None:
    with pytest.raises(SpecError, match=r"metricsAdapter\.enabled"):
        children(Settings(engine_image="engine:1", load_url=""), backend="KEDA")
