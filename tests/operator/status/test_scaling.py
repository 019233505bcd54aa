"""ScalingActive says whether the number of pods follows the load, and scaling up never changes Ready."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from e2e.operator import pods as kubelet
from quire_operator import spec, status
from quire_operator.observed import Observed, Ref
from quire_operator.status import transitions
from tests.operator.status.objects import Body, condition, deployment, model_body, pod, replica_set

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SCALED = {"autoscaling": {"minReplicas": 2, "maxReplicas": 8}}
EXTERNAL = {"autoscaling": {"maxReplicas": 8, "backend": "External"}}


def hpa(name: str = "m", of: str = "", **conditions: str) -> Body:
    """A HorizontalPodAutoscaler with conditions as `ScalingActive="False FailedGetObjectMetric"`."""
    owners = [{"kind": "ScaledObject", "name": of, "controller": True}] if of else []
    reported = [
        {"type": kind, "status": text.split()[0], "reason": text.split()[1], "message": f"says {kind}"}
        for kind, text in conditions.items()
    ]
    return {
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name, "uid": f"uid-{name}", "ownerReferences": owners},
        "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "m"}},
        "status": {"desiredReplicas": 4, "lastScaleTime": "2026-01-01T11:59:00Z", "conditions": reported},
    }


def compute(
    fields: Body,
    own: Body | None = None,
    *,
    of: Body | None = None,
    old: Body | None = None,
    has_adapter: bool = True,
    **more: Any,
) -> Body:
    body = model_body(**fields)
    children = {Ref("Deployment", "m"): of or deployment(replicas=2, ready=2)}
    if own is not None:
        children[Ref("HorizontalPodAutoscaler", "m")] = own
    observed = Observed(body={**body, "status": old or {}}, children=children, **more)
    return status.compute_status(spec.parse(body), observed, now=NOW, has_metrics_adapter=has_adapter)


def kinds(computed: Body) -> set[str]:
    return {c["type"] for c in computed["conditions"]}


def message(computed: Body) -> str:
    return next(str(c["message"]) for c in computed["conditions"] if c["type"] == "ScalingActive")


def available(since: str) -> Body:
    ready = {"type": "Available", "status": "True", "lastTransitionTime": since}
    return {"conditions": [ready]}


LONG_AGO = available("2026-01-01T11:00:00Z")
NO_METRIC = "False FailedGetObjectMetric"


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (
            {"AbleToScale": "True ReadyForNewScale", "ScalingActive": "True ValidMetricFound"},
            ("True", "ValidMetricFound"),
        ),
        (
            {"AbleToScale": "True SucceededGetScale", "ScalingActive": NO_METRIC},
            ("False", "MetricsUnavailable"),
        ),
        ({"ScalingActive": "False InvalidMetricSourceType"}, ("False", "MetricsUnavailable")),
        (
            {"AbleToScale": "False FailedGetScale", "ScalingActive": "True ValidMetricFound"},
            ("False", "FailedGetScale"),
        ),
        ({"ScalingActive": "False ScalingDisabled"}, ("False", "ScalingDisabled")),
        ({"ScalingActive": "False AmbiguousSelector"}, ("False", "ConflictingAutoscaler")),
        ({"ScalingActive": "False <b>"}, ("False", "AutoscalerFailed")),
        ({}, ("Unknown", "Pending")),
    ],
)
def test_scaling_active_mirrors_the_conditions_of_the_autoscaler(
    reported: dict[str, str], expected: tuple[str, str]
) -> None:
    computed = compute(SCALED, hpa(**reported), old=LONG_AGO)

    assert condition(computed, "ScalingActive") == expected
    if expected[0] == "False":
        assert f"says {'AbleToScale' if expected[1] == 'FailedGetScale' else 'ScalingActive'}" in message(
            computed
        )
    assert condition(computed, "Ready")[0] == "True", "what serves goes on serving"


def test_missing_metrics_are_reported_only_after_pods_have_been_available_for_a_while() -> None:
    broken = hpa(ScalingActive=NO_METRIC)
    loading = compute(SCALED, broken, of=deployment(replicas=2), old={})
    fresh = compute(SCALED, broken, old=available("2026-01-01T11:59:30Z"))
    first = compute(SCALED, broken, old={})
    long = compute(SCALED, broken, old=LONG_AGO)

    assert condition(loading, "ScalingActive") == ("Unknown", "NoReadyReplica")
    assert (
        condition(fresh, "ScalingActive")
        == condition(first, "ScalingActive")
        == ("Unknown", "AwaitingMetrics")
    )
    assert condition(long, "ScalingActive") == ("False", "MetricsUnavailable")
    assert status.changes_without_event(fresh) and not status.changes_without_event(long)
    assert transitions.events({}, fresh)[0].reason == "Ready"
    assert [e.reason for e in transitions.events(fresh, long)] == ["MetricsUnavailable"]
    assert transitions.events(long, long) == ()


@pytest.mark.parametrize("fields", [SCALED, {"replicas": 2}])
def test_a_conflicting_autoscaler_is_reported_with_its_owner(fields: Body) -> None:
    computed = compute(
        fields, hpa(ScalingActive="True ValidMetricFound"), foreign_autoscalers=(hpa("theirs", of="mine"),)
    )

    assert condition(computed, "ScalingActive") == ("False", "ConflictingAutoscaler")
    assert "HorizontalPodAutoscaler theirs of ScaledObject mine" in message(computed)
    assert "External" in message(computed)
    assert [e.reason for e in transitions.events(compute(fields), computed)] == ["ConflictingAutoscaler"]
    assert condition(computed, "Ready")[0] == "True"


def test_a_foreign_autoscaler_of_our_name_that_scales_the_deployment_is_no_ownership_conflict() -> None:
    body = model_body(**SCALED)
    rival = hpa()
    taken = Observed(body=body, foreign=(Ref("HorizontalPodAutoscaler", "m"),), foreign_autoscalers=(rival,))
    unrelated = Observed(body=body, foreign=(Ref("HorizontalPodAutoscaler", "m"),))

    assert status.ownership_conflict(taken) is None
    assert status.ownership_conflict(unrelated) is not None


def test_with_backend_external_the_users_autoscaler_is_mirrored() -> None:
    theirs = hpa("theirs", ScalingActive="True ValidMetricFound")

    alone = compute(EXTERNAL, foreign_autoscalers=(theirs,))
    assert condition(alone, "ScalingActive") == ("True", "ValidMetricFound")
    assert alone["scaling"] == {
        "backend": "External",
        "autoscaler": "theirs",
        "desiredReplicas": 4,
        "lastScaleTime": "2026-01-01T11:59:00Z",
    }
    none = compute(EXTERNAL)
    assert condition(none, "ScalingActive") == ("Unknown", "External")
    assert none["scaling"] == {"backend": "External"}
    two = compute(EXTERNAL, foreign_autoscalers=(theirs, hpa("other")))
    assert condition(two, "ScalingActive") == ("False", "ConflictingAutoscaler")


def test_without_autoscaling_there_is_no_scaling_active_condition() -> None:
    for fields in ({}, {"replicas": 3}, {"replicas": 0}, {"suspend": True}):
        computed = compute(fields)
        assert "ScalingActive" not in kinds(computed) and "scaling" not in computed
    suspended = compute({**SCALED, "suspend": True}, of=deployment(replicas=0))
    assert condition(suspended, "ScalingActive") == ("False", "Suspended")
    assert "scaling" not in suspended


@pytest.mark.parametrize(("value", "percent"), [("412m", 41.2), ("1", 100), ("x", None), (None, None)])
def test_gpu_utilization_is_read_from_the_current_metrics_of_the_autoscaler(
    value: Any, percent: float | None
) -> None:
    queue = {"object": {"metric": {"name": "llm_queue_depth"}, "current": {"averageValue": "7"}}}
    gpu = {"object": {"metric": {"name": "llm_gpu_utilization"}, "current": {"averageValue": value}}}
    live = {**hpa(), "status": {"currentMetrics": [{"type": "External"}, queue, gpu]}}

    assert status.pod_measurements(model_body(), live).gpu_percent == (
        pytest.approx(percent) if percent else None
    )
    assert status.pod_measurements(model_body(), None).gpu_percent is None


def test_gpu_utilization_is_read_from_kedas_autoscaler_too() -> None:
    metric = {"metric": {"name": "s3-metric-api-llm_gpu_utilization"}, "current": {"averageValue": "300m"}}
    live = {**hpa(), "status": {"currentMetrics": [{"type": "External", "external": metric}]}}

    assert status.pod_measurements(model_body(), live).gpu_percent == pytest.approx(30)


def test_load_time_and_disabled_scale_down_are_read_from_the_status_and_the_autoscaler() -> None:
    live = hpa()
    live["spec"]["behavior"] = {"scaleDown": {"selectPolicy": "Disabled"}}
    body = {**model_body(), "status": {"model": {"lastLoadSeconds": 214}}}

    assert (
        status.pod_measurements(body, live).load_seconds,
        status.pod_measurements(body, live).scale_down_disabled,
    ) == (214, True)
    assert (
        status.pod_measurements(model_body(), hpa()).load_seconds,
        status.pod_measurements(body, None).scale_down_disabled,
    ) == (
        None,
        False,
    )


def grown(count: int, *, ready: int, seen: bool = True, image: str = "engine:1") -> tuple[Body, Body]:
    """A Deployment whose number was just set, and the ReplicaSet of its pods."""
    live = deployment(replicas=2, ready=ready, seen=seen)
    live["spec"]["replicas"] = count
    made: Body = {
        "metadata": {"labels": {"pod-template-hash": "5d8f"}},
        "spec": {"containers": [{"name": "server", "image": image}]},
    }
    live["spec"]["template"] = {**live["spec"]["template"], "metadata": {"labels": {}}}
    return live, {**replica_set("rs2", 2), "spec": {"template": made}}


def test_ready_stays_true_while_scaling_up() -> None:
    for seen in (True, False):  # the Deployment's controller needs a moment to see the new number
        live, made = grown(8, ready=2, seen=seen)
        loading = [pod(kubelet.loading(), name=f"m-{i}") for i in range(6)]
        computed = compute(SCALED, of=live, replica_sets=(made,), pods=tuple(loading))

        assert condition(computed, "Ready") == ("True", "MinimumReplicasReady")
        assert condition(computed, "Reconciling")[0] == "False"
        assert computed["phase"] == "Serving"


def test_fewer_ready_pods_than_min_replicas_are_not_ready() -> None:
    live, made = grown(8, ready=1)
    assert condition(compute(SCALED, of=live, replica_sets=(made,)), "Ready")[0] == "False"


def test_a_template_change_is_not_mistaken_for_scaling_up() -> None:
    live, made = grown(8, ready=2, seen=False, image="engine:0")
    assert condition(compute(SCALED, of=live, replica_sets=(made,)), "Ready") == ("False", "RollingOut")


def test_a_rollout_that_has_just_begun_is_not_mistaken_for_scaling_up() -> None:
    live, made = grown(8, ready=2, seen=False)
    before = {**replica_set("rs1", 1), "status": {"replicas": 2}}
    assert condition(compute(SCALED, of=live, replica_sets=(before, made)), "Ready") == (
        "False",
        "RollingOut",
    )


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({"ScalingActive": NO_METRIC}, ("False", "MetricsAdapterMissing")),
        ({}, ("Unknown", "MetricsAdapterMissing")),
        ({"ScalingActive": "True ValidMetricFound"}, ("True", "ValidMetricFound")),
        ({"ScalingActive": "False ScalingDisabled"}, ("False", "ScalingDisabled")),
    ],
)
@pytest.mark.parametrize("backend", ["Auto", "HPA"])
def test_an_autoscaler_that_nothing_feeds_says_so_at_once_unless_another_adapter_does(
    backend: str, reported: dict[str, str], expected: tuple[str, str]
) -> None:
    fields = {"autoscaling": {"maxReplicas": 8, "backend": backend}}
    loading = deployment(replicas=1)

    computed = compute(fields, hpa(**reported), of=loading, has_adapter=False)

    assert condition(computed, "ScalingActive") == expected
    if expected[1] == "MetricsAdapterMissing":
        assert "watchNamespaces" in message(computed) and "External" in message(computed)
        warned = [event.reason for event in transitions.events({}, computed)]
        assert warned == (["MetricsAdapterMissing"] if expected[0] == "False" else [])
