"""With backend KEDA, ScalingActive mirrors KEDA's conditions, and scale to zero is no failure."""

from __future__ import annotations

from typing import Any

import pytest

from quire_operator import spec, status
from quire_operator.observed import Observed, Ref
from quire_operator.status import transitions
from tests.operator.status.objects import Body, condition, deployment, model_body
from tests.operator.status.test_scaling import LONG_AGO, NOW, SCALED, compute, hpa, kinds


def keda(
    *, count: int | None = None, own: Body | None = None, reported: Body | None = None, **more: Any
) -> Body:
    """With a ScaledObject that has these conditions, and `own` made of it by KEDA."""
    live = deployment(replicas=2, ready=2)
    if count is not None:
        live = deployment(replicas=count, ready=count)
        live["spec"]["replicas"] = count
    body = model_body(autoscaling={"maxReplicas": 4, "backend": "KEDA", **more.pop("autoscaling", {})})
    conditions = [
        {"type": kind, "status": text.split()[0], "reason": text.split()[1], "message": f"says {kind}"}
        for kind, text in (reported or {}).items()
    ]
    children = {
        Ref("Deployment", "m"): live,
        Ref("ScaledObject", "m"): {"status": {"conditions": conditions}},
    }
    observed = Observed(body={**body, "status": LONG_AGO}, children=children, keda_autoscaler=own, **more)
    return status.compute_status(spec.parse(body), observed, now=NOW)


MADE = hpa("keda-hpa-m", of="m", ScalingActive="True ValidMetricFound")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"missing": frozenset({"ScaledObject"})}, ("False", "KEDAMissing")),
        ({}, ("Unknown", "AwaitingKEDA")),
        ({"reported": {"Ready": "False ScaledObjectCheckFailed"}}, ("False", "ScaledObjectCheckFailed")),
        ({"own": MADE}, ("True", "ValidMetricFound")),
        ({"own": MADE, "reported": {"Paused": "True ScaledObjectPaused"}}, ("False", "ScaledObjectPaused")),
        ({"own": MADE, "reported": {"Fallback": "True FallbackExists"}}, ("False", "MetricsUnavailable")),
        ({"own": MADE, "reported": {"Ready": "False TriggerError"}}, ("True", "ValidMetricFound")),
        (
            {"own": hpa(ScalingActive="False FailedGetExternalMetric")},
            ("False", "MetricsUnavailable"),
        ),
    ],
)
def test_scaling_active_mirrors_the_scaled_object_and_its_autoscaler(
    fields: Body, expected: tuple[str, str]
) -> None:
    computed = keda(**fields)

    assert condition(computed, "ScalingActive") == expected
    assert computed["scaling"]["backend"] == "KEDA"
    assert computed["scaling"].get("autoscaler") == (fields.get("own") or {"metadata": {}})["metadata"].get(
        "name"
    )
    assert condition(computed, "Ready")[0] == "True", "what serves goes on serving"
    assert status.changes_without_event(computed) == (expected[1] in ("KEDAMissing", "AwaitingKEDA")), (
        "these kinds are not watched"
    )


def test_a_deployment_scaled_to_zero_is_idle_and_neither_ready_nor_reconciling_nor_stalled() -> None:
    asleep = keda(autoscaling={"idle": {}}, count=0, own=hpa(ScalingActive="False ScalingDisabled"))

    assert asleep["phase"] == "Idle"
    assert condition(asleep, "ScalingActive") == ("True", "Idle")
    assert condition(asleep, "Ready") == ("False", "Idle")
    assert condition(asleep, "Reconciling")[0] == condition(asleep, "Stalled")[0] == "False"
    awake = keda(autoscaling={"idle": {}}, count=1, own=MADE)
    assert (awake["phase"], condition(awake, "Ready")[0]) == ("Serving", "True")


def test_a_missing_activator_is_reported_in_one_event() -> None:
    address = {"scalerAddress": "keda-add-ons-http-external-scaler.keda:9090"}
    never, lost = keda(own=MADE), keda(own=MADE, autoscaling={"idle": {}})
    held = keda(own=MADE, autoscaling={"idle": {"activator": address}})

    assert "ActivatorReady" not in kinds(never)
    assert condition(lost, "ActivatorReady") == ("False", "ActivatorMissing")
    assert condition(held, "ActivatorReady") == ("True", "ActivatorGiven")
    assert [e.reason for e in transitions.events(never, lost)] == ["ActivatorMissing"]
    assert transitions.events(lost, lost) == transitions.events(lost, held) == ()


def test_an_autoscaler_that_keda_still_holds_is_pending_and_no_conflict() -> None:
    computed = compute(SCALED, keda_autoscaler=MADE, old=LONG_AGO)

    assert condition(computed, "ScalingActive") == ("Unknown", "Pending")
    assert "ScalingActive" not in kinds(compute({"replicas": 2}, keda_autoscaler=MADE))
