"""Scale-down deletes the idlest pod first: deletion costs are set only while an autoscaler is about to scale
down.
"""

from __future__ import annotations

from typing import Any

import pytest

from e2e.operator import pods as kubelet
from quire_operator import names
from quire_operator.observed import Observed, Ref, is_about_to_scale_down
from quire_operator.reports import Sample, parse_statusz
from tests.operator.plan.planning import plan_of
from tests.operator.status.objects import Body, model_body, pod

COST = names.ANNOTATION_DELETION_COST


def autoscaler(
    *reasons: str, current: int = 4, desired: int = 4, least: int = 1, policy: str = "Max"
) -> Body:
    return {
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "m", "uid": "h1"},
        "spec": {"minReplicas": least, "behavior": {"scaleDown": {"selectPolicy": policy}}},
        "status": {
            "currentReplicas": current,
            "desiredReplicas": desired,
            "conditions": [{"type": "X", "reason": reason} for reason in reasons],
        },
    }


NEAR = autoscaler("ScaleDownStabilized")


@pytest.mark.parametrize(
    ("found", "near"),
    [
        (NEAR, True),
        (autoscaler("ReadyForNewScale", "ScaleDownLimit"), True),
        (autoscaler(desired=3), True),
        (autoscaler("ReadyForNewScale", "DesiredWithinRange"), False),
        (autoscaler("ScaleUpStabilized", desired=6), False),
        (autoscaler("ScaleDownStabilized", current=2, least=2), False),
        (autoscaler("ScaleDownStabilized", desired=3, policy="Disabled"), False),
        ({"kind": "HorizontalPodAutoscaler", "metadata": {"name": "m"}}, False),
    ],
)
def test_an_autoscaler_is_about_to_scale_down_when_only_stabilization_or_a_rate_limit_delays_it(
    found: Body, near: bool
) -> None:
    assert is_about_to_scale_down(found) == near


def deletion_costs(
    *loads: int | None, by: Body | None = NEAR, known: str | None = None, **more: Any
) -> dict[str, Any]:
    """By pod, the cost that is written; pods are ready and run so many requests."""
    there = [pod(kubelet.ready(), name=f"m-{i}") for i in range(len(loads))]
    for body in there:
        body["metadata"]["annotations"] = {} if known is None else {COST: known}
        body["metadata"] |= more
    samples = {
        f"uid-m-{i}": Sample(phase="serving", requests=load)
        for i, load in enumerate(loads)
        if load is not None
    }
    children = {} if by is None else {Ref("HorizontalPodAutoscaler", "m"): by}
    seen = Observed(body=model_body(), children=children, pods=tuple(there), samples=samples)
    wanted = [{**by, "apiVersion": "autoscaling/v2"}] if by is not None else []
    return {patch.name: patch.annotations.get(COST) for patch in plan_of(wanted, seen).pod_patches}


def test_the_idlest_pod_gets_the_lowest_deletion_cost() -> None:
    assert deletion_costs(0, 1, 9, 200) == {"m-0": "0", "m-1": "1", "m-2": "4", "m-3": "8"}


def test_a_pod_without_a_load_sample_keeps_its_deletion_cost() -> None:
    assert deletion_costs(None, None) == {}
    assert deletion_costs(None, known="3") == {}


def test_a_small_change_of_the_load_writes_no_deletion_cost() -> None:
    assert deletion_costs(9, 15, known="4") == {}


def test_deletion_costs_are_removed_when_no_scale_down_is_imminent() -> None:
    assert deletion_costs(9, 0, by=autoscaler("ReadyForNewScale"), known="4") == {"m-0": None, "m-1": None}
    assert deletion_costs(9, by=autoscaler("ReadyForNewScale")) == {}


def test_without_our_autoscaler_existing_deletion_costs_are_left_alone() -> None:
    assert deletion_costs(9, by=None, known="4") == {}


def test_a_terminating_pod_gets_no_deletion_cost() -> None:
    assert deletion_costs(9, deletionTimestamp="2026-01-01T00:00:00Z") == {}


@pytest.mark.parametrize(
    ("said", "requests"),
    [
        (b'{"phase": "serving", "running": 3, "queued": 4}', 7),
        (b'{"phase": "serving", "running": 3}', None),
        (b'{"phase": "serving", "running": -1, "queued": 0}', None),
        (b'{"phase": "serving", "running": 1e300, "queued": 0}', None),
        (b'{"phase": "serving", "running": "9", "queued": 0}', None),
    ],
)
def test_an_invalid_or_incomplete_load_reported_by_a_pod_is_dropped(
    said: bytes, requests: int | None
) -> None:
    sample = parse_statusz(said)
    assert sample is not None and sample.requests == requests
