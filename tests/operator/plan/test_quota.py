"""A surge pod that a ResourceQuota refuses: Auto goes on in place, unless no old pod could make room for
it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from e2e.operator import pods
from quire_operator import quota, resources, spec
from quire_operator.observed import Observed, Ref
from quire_operator.plan import strategy
from quire_operator.settings import Settings
from tests.operator.plan.planning import goes_in_place
from tests.operator.status.objects import compute, condition, deployment, model_body, pod, replica_set

Body = dict[str, Any]

NOW = datetime.now(UTC)
REFUSED = 'pods "m-6f-x2" is forbidden: exceeded quota: team, '
ONE_POD = f"{REFUSED}requested: pods=1, used: pods=2, limited: pods=2"
OLD_POD = pod(pods.ready(), name="old", of="rs1")
OTHER_OLD_POD = pod(pods.ready(), name="other", of="rs1")


def refused(
    ago: float, message: str = ONE_POD, *, surge: int = 1, replicas: int = 2, updated: int = 0
) -> Body:
    """The Deployment of two replicas while its new ReplicaSet gets no pod."""
    body = deployment(replicas=replicas, updated=updated, ready=replicas)
    body["spec"] |= {"replicas": 2, "strategy": {"rollingUpdate": {"maxSurge": surge}}}
    failure = pods.condition("ReplicaFailure", "True", reason="FailedCreate", message=message, ago=ago)
    body["status"]["conditions"] = [failure]
    return body


@pytest.mark.parametrize(
    ("expected", "of", "rollout"),
    [
        (False, refused(50), {}),  # not for long enough
        (True, refused(70), {}),
        (False, refused(70), {"strategy": "Surge"}),  # its user prefers to wait
        (False, refused(70, 'pods "m-6f-x2" is forbidden: violates PodSecurity "restricted"'), {}),
        (False, refused(70, ONE_POD.replace("limited: pods=2", "limited: pods=0")), {}),
    ],
)
def test_in_place_starts_when_a_quota_refuses_the_surge_pod_for_surge_wait_seconds(
    expected: bool, of: Body, rollout: Body
) -> None:
    assert goes_in_place(of, OLD_POD, OTHER_OLD_POD, now=NOW, **rollout) is expected


def test_a_refused_pod_of_a_scale_up_is_no_reason_to_replace_in_place() -> None:
    new = pod(pods.ready(), name="new", of="rs2")
    assert not goes_in_place(refused(70, replicas=1, updated=1), new, now=datetime.now(UTC))


@pytest.mark.parametrize(
    ("amounts", "helps"),
    [
        ("requested: requests.memory=2Gi, used: requests.memory=3Gi, limited: requests.memory=4Gi", True),
        ("requested: memory=4Gi, used: memory=3Gi, limited: memory=4Gi", False),
        ("requested: limits.memory=2Gi, used: limits.memory=4Gi, limited: limits.memory=4Gi", True),
        ("requested: requests.cpu=1500m, used: requests.cpu=2, limited: requests.cpu=2500m", True),
        ("requested: requests.cpu=2, used: requests.cpu=2, limited: requests.cpu=2500m", False),
        (
            "requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=1, "
            "limited: requests.nvidia.com/gpu=1",
            True,
        ),
        (
            "requested: pods=1,requests.cpu=2, used: pods=1,requests.cpu=2, limited: pods=1,requests.cpu=2",
            False,
        ),
        ("requested: count/pods=1, used: count/pods=1, limited: count/pods=1", True),
        ("requested: requests.x=1Ei, used: requests.x=0, limited: requests.x=0", True),  # not understood
        ("in other words", True),
    ],
)
def test_an_old_pod_makes_room_if_what_it_frees_is_enough_for_the_new_one(amounts: str, helps: bool) -> None:
    old = pod(pods.ready(), name="old", of="rs1")
    asked = {"cpu": "1", "memory": "2Gi", "nvidia.com/gpu": "1"}
    old["spec"]["containers"] = [{"name": "server", "resources": {"requests": asked, "limits": asked}}]
    old["spec"]["initContainers"] = [
        {"name": "fetch", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}
    ]

    assert quota.makes_room(old, REFUSED + amounts) is helps


def test_a_refused_surge_pod_is_reported_with_its_remedy_and_is_not_degraded() -> None:
    reported = compute(OLD_POD, OTHER_OLD_POD, of=refused(2), body=model_body(replicas=2))

    assert condition(reported, "Scheduled") == ("False", "QuotaExceeded")
    assert condition(reported, "RolloutComplete") == ("False", "WaitingToSurge")
    assert condition(reported, "Degraded") == ("False", "AsExpected")
    (scheduled,) = [c for c in reported["conditions"] if c["type"] == "Scheduled"]
    assert "exceeded quota: team" in scheduled["message"] and "Have the quota raised" in scheduled["message"]
    (complete,) = [c for c in reported["conditions"] if c["type"] == "RolloutComplete"]
    assert "exceeded quota: team" in complete["message"] and "in place" in complete["message"]


def test_the_fallback_to_in_place_names_the_quota_as_its_cause() -> None:
    reported = compute(OLD_POD, OTHER_OLD_POD, of=refused(130, surge=0), body=model_body(replicas=2))

    assert condition(reported, "RolloutComplete") == ("False", "SurgeUnschedulable")
    (complete,) = [c for c in reported["conditions"] if c["type"] == "RolloutComplete"]
    assert "exceeded quota: team" in complete["message"]
    assert condition(reported, "Degraded") == ("False", "AsExpected")


@pytest.mark.parametrize(
    ("message", "rollout"),
    [(ONE_POD, {"strategy": "Surge"}), (ONE_POD.replace("limited: pods=2", "limited: pods=0"), {})],
)
def test_a_refused_pod_that_no_fallback_can_help_is_degraded_at_once(message: str, rollout: Body) -> None:
    body = model_body(replicas=2, rollout=rollout)
    reported = compute(OLD_POD, OTHER_OLD_POD, of=refused(2, message), body=body)

    assert condition(reported, "Degraded") == ("True", "QuotaExceeded")


@pytest.mark.parametrize(("ago", "expected"), [(100, "AsExpected"), (170, "QuotaExceeded")])
def test_a_refused_pod_is_degraded_only_after_the_drain_time_of_the_old_pods(
    ago: float, expected: str
) -> None:
    """The ReplicaSet controller tries again a while after the last old pod has gone."""
    of = refused(200, surge=0, replicas=1, updated=1)
    progressing = pods.condition("Progressing", "True", reason="ReplicaSetUpdated")
    of["status"]["conditions"].append({**progressing, "lastUpdateTime": pods.at(-ago)})
    new = pod(pods.ready(), name="new", of="rs2")

    assert condition(compute(new, of=of, body=model_body(replicas=2)), "Degraded")[1] == expected


def test_in_place_a_refused_pod_is_tried_again_when_an_old_pod_has_gone() -> None:
    """A changed annotation of the Deployment gets to its ReplicaSet, whose controller then tries at once."""
    model = spec.parse(model_body(replicas=2))
    desired = resources.build(model, Settings(engine_image="engine:1"))

    def annotations(of: Body, *of_pods: Body) -> dict[str, str]:
        observed = Observed(
            body=model_body(),
            children={Ref("Deployment", "m"): of},
            replica_sets=(replica_set("rs1", 1), replica_set("rs2", 2)),
            pods=of_pods,
        )
        settled = strategy.with_effective_strategy(desired, model, observed, NOW)
        return dict(settled[-1]["metadata"].get("annotations", {}))

    in_place = refused(130, surge=0)
    assert annotations(in_place, OLD_POD, OTHER_OLD_POD) != annotations(in_place, OLD_POD)
    of_another_kind = refused(130, "violates PodSecurity", surge=0)
    assert annotations(of_another_kind, OLD_POD, OTHER_OLD_POD) == annotations(of_another_kind, OLD_POD)


def test_a_sidecar_s_memory_counts_beside_the_server_s_in_what_a_pod_gives_back() -> None:
    def container(memory: str, **more: str) -> Body:
        return {"resources": {"requests": {"memory": memory}}, **more}

    beside = container("1Gi", restartPolicy="Always")
    old = {"spec": {"containers": [container("2Gi")], "initContainers": [container("2Gi"), beside]}}
    full = f"{REFUSED}requested: memory=3Gi, used: memory=4Gi, limited: memory=4Gi"
    assert quota.makes_room(old, full)
    assert not quota.makes_room({"spec": {"containers": [container("2Gi")]}}, full)
