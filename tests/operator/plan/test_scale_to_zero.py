"""Pods stop once each had no request for long enough, and start when a gateway asks for one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from e2e.operator import pods as kubelet
from quire_operator import names, resources, spec
from quire_operator.observed import Observed, Ref
from quire_operator.plan import PlanInput, PlanResult, make_plan, scale_to_zero
from quire_operator.reports import Sample
from quire_operator.settings import Settings
from tests.operator.status.objects import model_body, pod

NOW = datetime(2026, 1, 1, tzinfo=UTC)
AFTER = 600
SCALED = {"minReplicas": 0, "maxReplicas": 4, "idle": {"afterSeconds": AFTER}}
SETTINGS = Settings(engine_image="engine:1", gateway_namespaces=("ns",))
OURS = {"manager": "quire-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}}


def plan(
    *quiet_for: float | None,
    count: int = 1,
    asked_ago: float = 5,
    served: str = "",
    demand: float | None = None,
    gateway: bool = True,
    **scaling: Any,
) -> PlanResult:
    """`quiet_for`: of each pod; None while it has a request. `demand`: seconds since a gateway said so."""
    model = spec.parse(model_body(autoscaling={**SCALED, **scaling}))
    desired = resources.build(model, SETTINGS)
    (manifest,) = [one for one in desired if one["kind"] == "Deployment"]
    live = {**manifest, "metadata": {**manifest["metadata"], "uid": "d1", "resourceVersion": "7"}}
    live["metadata"]["managedFields"] = [OURS]
    if served:
        live["metadata"]["annotations"] = {names.ANNOTATION_APPLIED_HASH: served}
    live["spec"] = {**live["spec"], "replicas": count}
    pods = [pod(kubelet.ready(), name=f"m-{index}") for index in range(len(quiet_for))]
    samples = {
        str(one["metadata"]["uid"]): Sample(
            phase="serving",
            requests=0 if seconds is not None else 1,
            quiet_since=None if seconds is None else NOW.timestamp() - seconds,
            asked_at=NOW.timestamp() - asked_ago,
        )
        for one, seconds in zip(pods, quiet_for, strict=True)
    }
    observed = Observed(
        body=model_body(autoscaling={**SCALED, **scaling}),
        children={Ref("Deployment", "m"): live},
        pods=tuple(pods),
        samples=samples,
        demanded_at=0.0 if demand is None else NOW.timestamp() - demand,
    )
    return make_plan(
        PlanInput(model=model, desired=tuple(desired), observed=observed, now=NOW, has_gateway=gateway)
    )


def applied(result: PlanResult) -> int | None:
    """The number of pods that is written, None where none is."""
    numbers = [one["spec"].get("replicas") for one in result.plan.apply if one["kind"] == "Deployment"]
    return numbers[0] if numbers else None


@pytest.mark.parametrize(
    ("quiet_for", "number"),
    [
        ((AFTER,), 0),
        ((AFTER + 1, AFTER), 0),
        ((AFTER + 1, AFTER - 1), 1),
        ((AFTER + 1, None), 1),
        ((), 1),
    ],
)
def test_all_pods_stop_once_each_was_without_a_request_for_long_enough(
    quiet_for: tuple[float | None, ...], number: int
) -> None:
    assert (applied(plan(*quiet_for)) == 0) is (number == 0)


def test_the_end_of_the_time_is_waited_for_without_an_event() -> None:
    assert plan(AFTER - 20).requeue_after == pytest.approx(20)
    assert plan(AFTER - 20, AFTER - 60).requeue_after == pytest.approx(60)
    assert plan(None).requeue_after is None
    assert plan(count=0).requeue_after is None


def test_a_model_without_pods_starts_some_when_requests_wait_and_not_before() -> None:
    assert applied(plan(count=0)) in (0, None)
    assert applied(plan(count=0, demand=3600)) in (0, None)
    assert applied(plan(count=0, demand=5)) == 1
    assert applied(plan(count=0, demand=5, minReplicas=2)) == 2, "with idle the minimum is that of a busy one"


def test_requests_that_wait_keep_pods_that_are_idle() -> None:
    assert applied(plan(AFTER + 1, demand=5)) != 0


def test_pods_that_were_woken_run_for_as_long_as_others_before_they_stop() -> None:
    assert applied(plan(AFTER + 1, demand=AFTER - 1)) != 0
    assert applied(plan(AFTER + 1, demand=AFTER)) == 0


def test_without_a_gateway_that_would_start_them_again_pods_never_stop() -> None:
    assert applied(plan(AFTER + 1, gateway=False)) != 0
    assert applied(plan(count=0, gateway=False)) == 1


def test_a_pod_that_loads_or_does_not_answer_counts_as_busy() -> None:
    loading = pod(kubelet.loading(), name="m-1")
    model = spec.parse(model_body(autoscaling=SCALED))
    quiet = Sample(phase="serving", requests=0, quiet_since=NOW.timestamp() - AFTER, asked_at=NOW.timestamp())
    observed = Observed(
        body=model_body(autoscaling=SCALED),
        children={Ref("Deployment", "m"): {"kind": "Deployment", "spec": {"replicas": 2}, "metadata": {}}},
        pods=(pod(kubelet.ready(), name="m-0"), loading),
        samples={"uid-m-0": quiet, "uid-m-1": quiet},
    )

    def is_idle(of: Observed) -> bool:
        return scale_to_zero.is_idle(model, of, NOW, has_gateway=True)

    assert not is_idle(observed)
    assert is_idle(replace(observed, pods=observed.pods[:1]))
    assert not is_idle(replace(observed, pods=observed.pods[:1], samples={}))


def test_an_answer_from_before_says_nothing_of_the_present() -> None:
    """A pod of a model that may not stop is asked once, when it becomes ready. Then the spec changes."""
    assert applied(plan(86_400, asked_ago=86_400)) != 0


def test_a_pod_that_was_evicted_keeps_no_other_one_running() -> None:
    evicted = pod({"phase": "Failed", "reason": "Evicted"}, name="m-1")
    now = NOW.timestamp()
    quiet = Sample(phase="serving", requests=0, quiet_since=now - AFTER, asked_at=now)
    observed = Observed(
        body=model_body(autoscaling=SCALED),
        children={Ref("Deployment", "m"): {"kind": "Deployment", "spec": {"replicas": 1}, "metadata": {}}},
        pods=(pod(kubelet.ready(), name="m-0"), evicted),
        samples={"uid-m-0": quiet},
    )
    assert scale_to_zero.is_idle(spec.parse(observed.body), observed, NOW, has_gateway=True)


def test_what_was_changed_while_no_pod_ran_starts_once_so_that_an_error_in_it_shows() -> None:
    assert applied(plan(count=0, served="another")) == 1


def test_pods_that_stop_and_start_are_no_repair_of_what_another_manager_did() -> None:
    hashed = plan(AFTER).plan.apply[-1]["metadata"]["annotations"][names.ANNOTATION_APPLIED_HASH]
    stops, starts = plan(AFTER, served=hashed), plan(count=0, demand=5, served=hashed)
    assert (applied(stops), applied(starts)) == (0, 1)
    for result in (stops, starts):
        assert Ref("Deployment", "m") not in result.plan.repairs


def test_a_number_that_another_manager_has_set_to_zero_is_a_repair_where_pods_never_stop() -> None:
    awake: dict[str, Any] = {"minReplicas": 1, "idle": None}
    hashed = plan(count=0, **awake).plan.apply[-1]["metadata"]["annotations"][names.ANNOTATION_APPLIED_HASH]
    repaired = plan(count=0, served=hashed, **awake)
    assert applied(repaired) == 1 and Ref("Deployment", "m") in repaired.plan.repairs


@pytest.mark.parametrize(("demand", "due"), [(15, 15), (29, 1)])
def test_a_short_time_without_requests_ends_with_the_demand(demand: float, due: float) -> None:
    result = plan(60, demand=demand, idle={"afterSeconds": 10})
    assert applied(result) != 0 and result.requeue_after == pytest.approx(due)


def test_an_object_without_scale_to_zero_is_never_idle() -> None:
    assert applied(plan(AFTER + 1, minReplicas=1, idle=None)) != 0


def test_the_number_is_written_only_over_the_version_that_was_read() -> None:
    (manifest,) = [one for one in plan(AFTER).plan.apply if one["kind"] == "Deployment"]
    assert manifest["metadata"]["resourceVersion"] == "7", "an autoscaler may have written in between"
