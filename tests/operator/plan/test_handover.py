"""A change from a Deployment to groups of nodes, or back, deletes nothing that serves before its successor
does.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from e2e.operator import pods as kubelet
from quire_operator import names, resources, spec, status
from quire_operator.observed import Observed, Ref
from quire_operator.plan import with_applied_hash
from quire_operator.settings import Settings
from tests.operator.plan.planning import plan_of
from tests.operator.plan.test_groups import body
from tests.operator.status import objects as single
from tests.operator.status.group_objects import member
from tests.operator.status.objects import Body, condition

SETTINGS = Settings(engine_image="registry.example/quire-server:1")
DEPLOYMENT, GROUPS = Ref("Deployment", "m"), Ref(names.GROUP_KIND, "m")
NO_ROOM = "0/2 nodes are available: 2 Insufficient cpu. No preemption victims found for incoming pod."


def workload(kind: str, *, ready: int = 1) -> Body:
    """As it is in the cluster; `ready`: of a Deployment with one replica."""
    of = body(nodes=1 if kind == "Deployment" else 2)
    (made,) = [one for one in resources.build(spec.parse(of), SETTINGS) if one["kind"] == kind]
    live = with_applied_hash(made)
    about = {
        "uid": f"uid-{kind}",
        "resourceVersion": "5",
        "generation": 1,
        "creationTimestamp": kubelet.at(-5),
    }
    counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), ready)
    reported = {} if kind == names.GROUP_KIND else {"status": {"observedGeneration": 1, **counts}}
    return {**live, **reported, "metadata": {**live["metadata"], **about}}


def seen(
    nodes: int, *live: Body, pods: tuple[Body, ...] = (), missing: str = "", **rollout: object
) -> Observed:
    """What there is when the spec asks for so many nodes."""
    return Observed(
        body=body(nodes=nodes, **({"rollout": rollout} if rollout else {})),
        children={Ref(one["kind"], "m"): one for one in live},
        missing=frozenset([missing] if missing else []),
        pods=tuple(one for one in pods if one["metadata"]["name"] != "m-0-1"),
        workers=tuple(one for one in pods if one["metadata"]["name"] == "m-0-1"),
    )


def deleted(observed: Observed) -> set[Ref]:
    wanted = resources.build(spec.parse(observed.body), SETTINGS)
    return {target for target, _ in plan_of(wanted, observed).delete} & {DEPLOYMENT, GROUPS}


def group(reported: Body) -> tuple[Body, Body]:
    return member(kubelet.ready()), member(reported, worker=1)


OLD_POD = single.pod(kubelet.ready(), name="m-old")


def test_a_deployment_stays_until_all_groups_are_ready() -> None:
    old = workload("Deployment")
    assert deleted(seen(2, old)) == set(), "there is no LeaderWorkerSet yet"
    groups = workload(names.GROUP_KIND)
    assert deleted(seen(2, old, groups)) == set(), "it has no pods"
    assert deleted(seen(2, old, groups, pods=group(kubelet.loading()))) == set()
    assert deleted(seen(2, old, groups, pods=group(kubelet.ready()))) == {DEPLOYMENT}


def test_a_deployment_stays_where_groups_cannot_be_made() -> None:
    assert deleted(seen(2, workload("Deployment"), missing=names.GROUP_KIND)) == set()


def test_groups_stay_until_the_deployment_is_ready() -> None:
    groups, pods = workload(names.GROUP_KIND), group(kubelet.ready())
    assert deleted(seen(1, groups, pods=pods)) == set()
    assert deleted(seen(1, groups, workload("Deployment", ready=0), pods=pods)) == set()
    assert deleted(seen(1, groups, workload("Deployment", ready=1), pods=pods)) == {GROUPS}


@pytest.mark.parametrize(
    ("nodes", "strategy", "waits", "goes"),
    [
        (2, "Auto", 120, False),
        (2, "Auto", 30, True),
        (2, "InPlace", 120, True),
        (1, "Auto", 120, False),
        (1, "Auto", 30, True),
        (1, "Surge", 30, False),
        (1, "InPlace", 120, True),
        (1, "Recreate", 120, True),
    ],
)
def test_where_there_is_no_room_for_both_the_strategy_decides(
    nodes: int, strategy: str, waits: int, goes: bool
) -> None:
    """The pod has waited for a minute."""
    waiting, old = kubelet.unschedulable(NO_ROOM), group(kubelet.ready())
    pods = group(waiting) if nodes == 2 else (*old, single.pod(waiting, name="m-new"))
    live = (workload("Deployment", ready=nodes - 1), workload(names.GROUP_KIND))
    observed = seen(nodes, *live, pods=pods, strategy=strategy, surgeWaitSeconds=waits)
    assert deleted(observed) == ({DEPLOYMENT if nodes == 2 else GROUPS} if goes else set())


def test_groups_that_get_no_pod_at_all_are_waited_for_no_longer_than_for_room() -> None:
    """A quota may refuse them, which only Events say."""
    groups = workload(names.GROUP_KIND)
    rollout = {"strategy": "Auto", "surgeWaitSeconds": 60}
    assert deleted(seen(2, workload("Deployment"), groups, **rollout)) == set()
    groups["metadata"]["creationTimestamp"] = kubelet.at(-61)
    assert deleted(seen(2, workload("Deployment"), groups, **rollout)) == {DEPLOYMENT}


def test_a_successor_that_is_being_deleted_is_none() -> None:
    groups = workload(names.GROUP_KIND)
    groups["metadata"]["deletionTimestamp"] = kubelet.at(0)
    assert deleted(seen(2, workload("Deployment"), groups, pods=group(kubelet.ready()))) == set()


def test_the_config_map_of_pods_that_stay_stays() -> None:
    old = workload("Deployment")
    environment = old["spec"]["template"]["spec"]["containers"][0]["envFrom"][0]["configMapRef"]["name"]
    sets = {**single.replica_set("rs2", 1), "spec": {"template": old["spec"]["template"]}}
    observed = seen(2, old)
    children = {
        **observed.children,
        Ref("ConfigMap", environment): {"kind": "ConfigMap", "metadata": {"name": environment, "uid": "c1"}},
    }
    kept = Observed(body=observed.body, children=children, replica_sets=(sets,))
    plan = plan_of(resources.build(spec.parse(observed.body), SETTINGS), kept)
    assert Ref("ConfigMap", environment) not in {target for target, _ in plan.delete}


@pytest.mark.parametrize("nodes", [1, 2])
def test_while_both_are_there_the_status_counts_the_pods_of_both_and_the_rollout_goes_on(nodes: int) -> None:
    half = group(kubelet.loading()) if nodes == 2 else group(kubelet.ready())
    live = (workload("Deployment", ready=nodes - 1), workload(names.GROUP_KIND))
    observed = seen(nodes, *live, pods=(*half, *([OLD_POD] if nodes == 2 else [])))
    computed = status.compute_status(spec.parse(observed.body), observed, now=datetime.now(UTC))
    assert computed["readyReplicas"] == 1, "the old one serves"
    assert condition(computed, "Available")[0] == "True"
    assert condition(computed, "RolloutComplete")[0] == "False"
