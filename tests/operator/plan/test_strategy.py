"""Strategy Auto surges, falls back to in-place replacement without resources, and surges again in the next
rollout.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from e2e.operator import pods
from quire_operator import resources, spec
from quire_operator.observed import Observed, Ref
from quire_operator.plan import strategy
from quire_operator.settings import Settings
from tests.operator.plan.planning import goes_in_place
from tests.operator.status.objects import compute, condition, deployment, model_body, pod, replica_set

Body = dict[str, Any]

NOW = datetime.now(UTC)  # the pods below are made at the same moment
NO_GPU = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
WRONG_NODE = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
NO_VOLUME = "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."


def waiting(ago: float, message: str = NO_GPU) -> Body:
    reported = [pods.condition("PodScheduled", "False", reason="Unschedulable", message=message, ago=ago)]
    return pod({"phase": "Pending", "conditions": reported}, name="new", of="rs2")


OLD_POD = pod(pods.ready(), name="old", of="rs1")


def live(*, surge: int = 1, replicas: int = 3, updated: int = 1, ready: int = 2, seen: bool = True) -> Body:
    body = deployment(replicas=replicas, updated=updated, ready=ready, seen=seen)
    body["spec"]["replicas"] = 2
    body["spec"]["strategy"] = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge}}
    return body


@pytest.mark.parametrize(
    ("expected", "of", "of_pods", "rollout"),
    [
        (False, live(), (OLD_POD, waiting(50)), {}),  # not for long enough
        (True, live(), (OLD_POD, waiting(70)), {}),
        (False, live(), (waiting(70),), {}),  # nothing to replace: the first pod waits for its node
        (False, live(), (OLD_POD, waiting(70, WRONG_NODE)), {}),  # room would not help
        (False, live(), (OLD_POD, waiting(70, NO_VOLUME)), {}),
        (False, live(), (OLD_POD, waiting(70)), {"strategy": "Surge"}),  # its user prefers to wait
        (False, live(), (OLD_POD, waiting(70)), {"strategy": "Recreate"}),
        (
            False,
            live(surge=0),
            (OLD_POD,),
            {"maxSurge": 0, "maxUnavailable": 1},
        ),  # there is no surge to give up
        (True, live(surge=0), (OLD_POD,), {}),  # the new pod has its node now: the rest goes in place, too
        (True, live(surge=0, replicas=2, updated=2, seen=False), (OLD_POD,), {}),  # another edit meanwhile
        (
            True,
            live(surge=0, replicas=1, updated=1, ready=0),
            (waiting(70),),
            {},
        ),  # the old pod has just gone
        (True, live(surge=0, replicas=1, updated=1, ready=1), (), {}),  # the last new pod is not there yet
        (False, live(surge=0, replicas=2, updated=2), (), {}),  # done: back to surging
    ],
)
def test_in_place_starts_when_a_surge_pod_stays_unschedulable_and_ends_with_the_rollout(
    expected: bool, of: Body, of_pods: tuple[Body, ...], rollout: Body
) -> None:
    assert goes_in_place(of, *of_pods, now=NOW, **rollout) is expected


@pytest.mark.parametrize(("ago", "expected"), [(20, False), (600, True)])
def test_a_surge_pod_that_kueue_holds_falls_back_to_in_place_after_surge_wait_seconds(
    ago: float, expected: bool
) -> None:
    held = pod(pods.gated(), name="m-new")
    held["spec"] |= {"nodeName": "", "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    held["metadata"]["creationTimestamp"] = pods.at(-ago)

    now = datetime.now(UTC)  # the pod is as old as it says from here on
    assert goes_in_place(live(), OLD_POD, held, surgeWaitSeconds=120, now=now) is expected


def test_in_place_replaces_one_pod_at_a_time() -> None:
    model = spec.parse(model_body(replicas=2))
    desired = resources.build(model, Settings(engine_image="engine:1"))
    observed = Observed(
        body=model_body(),
        children={Ref("Deployment", "m"): live()},
        replica_sets=(replica_set("rs1", 1), replica_set("rs2", 2)),
        pods=(OLD_POD, waiting(121)),
    )
    settled = strategy.with_effective_strategy(desired, model, observed, datetime.now(UTC))
    assert settled[-1]["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert [m for m in settled if m["kind"] != "Deployment"] == list(desired[:-1])


def test_a_pending_surge_pod_is_reported_as_waiting_to_surge_and_not_as_degraded() -> None:
    reported = compute(OLD_POD, waiting(30), of=live(), body=model_body(replicas=2))
    assert condition(reported, "Degraded") == ("False", "AsExpected")
    assert condition(reported, "RolloutComplete") == ("False", "WaitingToSurge")
    assert condition(reported, "Scheduled") == ("False", "WaitingForGPU")
    assert reported["rollout"] == {"strategyInEffect": "Surge"}


@pytest.mark.parametrize(
    ("of_pods", "rollout", "reason"),
    [
        ((OLD_POD, waiting(30)), {"strategy": "Surge"}, "WaitingForGPU"),
        ((OLD_POD, waiting(30, WRONG_NODE)), {}, "WaitingForNode"),
        ((waiting(30),), {}, "WaitingForGPU"),
    ],
)
def test_a_pending_pod_that_no_fallback_to_in_place_can_help_is_degraded(
    of_pods: tuple[Body, ...], rollout: Body, reason: str
) -> None:
    reported = compute(*of_pods, of=live(), body=model_body(replicas=2, rollout=rollout), now=NOW)
    assert condition(reported, "Degraded") == ("True", reason)


def test_an_unschedulable_pod_is_degraded_only_after_the_drain_time_of_the_old_pods() -> None:
    def reported(ago: float) -> Body:
        of = live(replicas=1, updated=1)
        moved = {"type": "Progressing", "status": "True", "reason": "ReplicaSetUpdated"}
        of["status"]["conditions"] = [{**moved, "lastUpdateTime": pods.at(-ago)}]
        return compute(
            waiting(130), of=of, body=model_body(drain={"preStopSeconds": 10, "timeoutSeconds": 60})
        )

    assert condition(reported(95), "Degraded") == ("False", "AsExpected")
    assert condition(reported(105), "Degraded") == ("True", "WaitingForGPU")


def test_a_fallback_from_surge_to_in_place_is_reported_with_its_cause() -> None:
    reported = compute(OLD_POD, waiting(130), of=live(surge=0), body=model_body(replicas=2))
    assert condition(reported, "RolloutComplete") == ("False", "SurgeUnschedulable")
    assert "Insufficient nvidia.com/gpu" in str(reported["conditions"])
    assert reported["rollout"] == {"strategyInEffect": "InPlace"}
