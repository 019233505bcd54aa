"""A drain may evict one pod of those that serve, also beside replicas that find no place."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from e2e.operator import pods
from quire_operator import resources, spec
from quire_operator.observed import Observed, Ref
from quire_operator.plan import disruption_budget
from quire_operator.settings import Settings
from tests.operator.status.objects import deployment, model_body, pod, replica_set

Body = dict[str, Any]

NOW = datetime.now(UTC)  # the pods below are made at the same moment
IN_USE = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
CORDONED = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) were unschedulable."
SERVES = pod(pods.ready(), name="serves")


def waiting(message: str = IN_USE, *, ago: float = 30) -> Body:
    reported = [pods.condition("PodScheduled", "False", reason="Unschedulable", message=message, ago=ago)]
    return pod({"phase": "Pending", "conditions": reported}, name=f"waits-{ago}")


def terminating() -> Body:
    body = pod(pods.ready(), name="goes")
    body["metadata"]["deletionTimestamp"] = pods.at()
    return body


@pytest.mark.parametrize(
    ("of_pods", "expected"),
    [
        ((SERVES,), 1),
        ((SERVES, waiting()), 2),
        ((SERVES, waiting(), waiting(ago=20)), 3),
        ((SERVES, waiting(ago=1)), 1),  # it may be placed in a moment
        ((SERVES, waiting(CORDONED)), 1),  # another node is drained: that drain comes first
        ((SERVES, waiting(), terminating()), 1),  # it gets the place of the one that goes
        ((pod(pods.ready(), name="old", of="rs1"), waiting()), 1),  # a rollout
    ],
)
def test_a_replica_that_finds_no_place_does_not_count_as_one_that_a_drain_has_evicted(
    of_pods: tuple[Body, ...], expected: int
) -> None:
    desired = resources.build(spec.parse(model_body()), Settings(engine_image="engine:1"))
    sets = (replica_set("rs1", 1), replica_set("rs2", 2))
    observed = Observed(body=model_body(), replica_sets=sets, pods=of_pods)

    raised = disruption_budget.with_replicas_that_serve(desired, spec.parse(model_body()), observed, NOW)

    (budget,) = [one for one in raised if one["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["maxUnavailable"] == expected
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert [one for one in raised if one is not budget] == [
        one for one in desired if one["kind"] != budget["kind"]
    ]


@pytest.mark.parametrize(
    ("ago", "of_pods", "expected"),
    [
        (400, (SERVES,), 2),
        (300, (SERVES,), 1),  # an evicted pod may still count in the quota, or its successor be due
        (400, (SERVES, terminating()), 1),
        (400, (pod(pods.ready(), name="old", of="rs1"),), 1),  # a rollout
    ],
)
def test_a_replica_that_a_quota_refuses_for_good_does_not_count_either(
    ago: float, of_pods: tuple[Body, ...], expected: int
) -> None:
    model = spec.parse(model_body(replicas=2))
    live = deployment(replicas=1, ready=1)
    live["spec"]["replicas"] = 2
    live["status"]["conditions"] = [
        pods.condition("ReplicaFailure", "True", reason="FailedCreate", message="exceeded quota: q", ago=ago)
    ]
    observed = Observed(
        body=model_body(),
        children={Ref("Deployment", "m"): live},
        replica_sets=(replica_set("rs1", 1), replica_set("rs2", 2)),
        pods=of_pods,
    )
    desired = resources.build(model, Settings(engine_image="engine:1"))

    raised = disruption_budget.with_replicas_that_serve(desired, model, observed, datetime.now(UTC))

    (budget,) = [one for one in raised if one["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["maxUnavailable"] == expected
