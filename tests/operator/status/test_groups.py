"""Groups of pods: ready as a whole, with the pod that waits for a place, slowed where they crash for ever."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from e2e.operator import pods as kubelet
from quire_operator.reports import RankReport, Sample
from tests.operator.status import objects as single
from tests.operator.status.group_objects import compute, member, recreated
from tests.operator.status.objects import Body, condition

NO_NODE = "0/2 nodes are available: 2 Insufficient cpu."


def test_a_replica_is_ready_when_all_pods_of_its_group_are() -> None:
    half = compute(member(kubelet.ready()), member(kubelet.loading(), worker=1))
    whole = compute(member(kubelet.ready()), member(kubelet.ready(), worker=1))

    assert (half["replicas"], half["readyReplicas"]) == (1, 0)
    assert condition(half, "Ready")[0] == "False"
    assert (whole["replicas"], whole["readyReplicas"]) == (1, 1)
    assert condition(whole, "Ready") == ("True", "AllReplicasReady")
    (group,) = whole["groups"]
    assert (group["phase"], group["readyPods"], group["pods"]) == ("Serving", 2, 2)


def test_a_group_whose_leader_alone_exists_is_not_ready() -> None:
    assert compute(member(kubelet.ready()))["readyReplicas"] == 0


def test_a_group_of_an_older_revision_keeps_the_rollout_incomplete() -> None:
    old = [member(kubelet.ready(), worker=worker, revision="bbbbbbbbbb") for worker in (0, 1)]
    new = [member(kubelet.ready(), 1, worker) for worker in (0, 1)]
    computed = compute(*old, *new, groups=2)

    assert (computed["replicas"], computed["updatedReplicas"]) == (2, 1)
    assert condition(computed, "RolloutComplete")[0] == "False"


def test_a_failure_of_a_worker_is_told_with_its_pod() -> None:
    computed = compute(member(kubelet.loading()), member(kubelet.terminated(70, "EngineCrashed"), worker=1))

    assert condition(computed, "Degraded") == ("True", "EngineCrashed")
    assert computed["lastFailure"]["pod"] == "m-0-1"
    assert computed["groups"][0]["lastFailure"]["pod"] == "m-0-1"


@pytest.mark.parametrize(("age", "reason"), [(60, "WaitingForNode"), (130, "GroupIncomplete")])
def test_a_half_placed_group_is_told_after_two_minutes_with_who_waits_and_why(age: int, reason: str) -> None:
    waiting = kubelet.unschedulable(NO_NODE)
    computed = compute(member(kubelet.loading(), age=age), member(waiting, worker=1, age=age))

    assert condition(computed, "Ready") == ("False", reason)
    if reason == "GroupIncomplete":
        (ready,) = [c for c in computed["conditions"] if c["type"] == "Ready"]
        assert "m-0-1" in ready["message"] and "Insufficient cpu" in ready["message"]


def test_a_group_that_has_no_node_at_all_waits_and_is_not_incomplete() -> None:
    waiting = kubelet.unschedulable(NO_NODE)
    computed = compute(member(waiting, age=300), member(waiting, worker=1, age=300))

    assert condition(computed, "Ready") == ("False", "WaitingForNode")


def test_five_recreations_within_ten_minutes_are_a_crash_loop_which_is_stalled() -> None:
    four, five = recreated(4), recreated(5)

    assert condition(four, "Stalled")[0] == "False"
    assert condition(five, "Stalled") == ("True", "GroupCrashLoop")
    assert condition(five, "Ready") == ("False", "GroupCrashLoop")
    (group,) = five["groups"]
    assert (group["phase"], group["startDelaySeconds"]) == ("CrashLoop", 10)
    (ready,) = [c for c in five["conditions"] if c["type"] == "Ready"]
    assert "group 0" in ready["message"] and "EngineCrashed" in ready["message"]


def test_a_look_between_two_lives_of_a_group_forgets_nothing() -> None:
    three = recreated(3)
    between = compute(old=three)
    assert between["groups"][0]["recreations"] == three["groups"][0]["recreations"]
    assert (between["groups"][0]["phase"], between["groups"][0]["readyPods"]) == ("Pending", 0)
    pods = [member(kubelet.loading(), worker=worker, uid="life-4") for worker in (0, 1)]
    assert len(compute(*pods, old=between)["groups"][0]["recreations"]) == 4


def test_a_group_that_was_scaled_away_is_told_no_more() -> None:
    pods = [member(kubelet.ready(), group, worker) for group in (0, 1) for worker in (0, 1)]
    both = compute(*pods, groups=2)
    assert [group["index"] for group in both["groups"]] == [0, 1]
    assert [group["index"] for group in compute(*pods[:2], groups=1, old=both)["groups"]] == [0]


def test_each_further_recreation_doubles_the_delay_up_to_a_bound() -> None:
    delays = [recreated(times)["groups"][0].get("startDelaySeconds", 0) for times in (5, 6, 7, 20)]

    assert delays == [10, 20, 40, 640]


def test_five_recreations_in_an_hour_are_no_crash_loop() -> None:
    assert condition(recreated(5, apart=720.0), "Stalled")[0] == "False"


def test_a_group_that_serves_for_long_has_recovered() -> None:
    looping = recreated(5)
    later = datetime.now(UTC) + timedelta(hours=1)
    pods = [member(kubelet.ready(), worker=worker, uid="life-5") for worker in (0, 1)]
    computed = compute(*pods, old=looping, now=later)

    (group,) = computed["groups"]
    assert "startDelaySeconds" not in group and "recreations" not in group
    assert condition(computed, "Ready")[0] == "True"


def test_the_slowest_rank_of_a_group_is_named_wherever_it_runs() -> None:
    reports = {
        "uid-m-0": Sample(phase="serving", ranks=(RankReport(rank=0, last_step=9),)),
        "uid-m-0-1": Sample(phase="stalled", ranks=(RankReport(rank=1, last_step=9, missing="Silent"),)),
    }
    pods = [member(kubelet.ready()), member(kubelet.loading(), worker=1)]
    assert compute(*pods, samples=reports)["groups"][0]["slowestRank"] == 1
    alike = {
        uid: Sample(phase="serving", ranks=(RankReport(rank=rank, last_step=9),))
        for rank, uid in enumerate(reports)
    }
    assert "slowestRank" not in compute(*pods, samples=alike)["groups"][0]


def test_of_a_group_that_serves_the_rank_is_named_that_is_slow_in_several_answers() -> None:
    pods = [member(kubelet.ready()), member(kubelet.ready(), worker=1)]
    late = (RankReport(rank=0, last_step=9), RankReport(rank=1, last_step=8, step_micros=90_000))
    once = {"uid-m-0": Sample(phase="serving", ranks=late)}
    assert "slowestRank" not in compute(*pods, samples=once)["groups"][0], "its echo is on the way"
    slow = {"uid-m-0": Sample(phase="serving", slow_rank=1)}
    assert compute(*pods, samples=slow)["groups"][0]["slowestRank"] == 1


def test_a_leader_names_the_rank_of_another_pod_that_says_nothing() -> None:
    ranks = [RankReport(rank=0, last_step=9), RankReport(rank=1, last_step=9)]
    seen = replace(ranks[1], missing="NotEchoed", host="m-0-1")
    pods = [member(kubelet.ready()), member(kubelet.loading(), worker=1)]

    def named(*leader: RankReport, worker: tuple[RankReport, ...] = ()) -> int | None:
        samples = {
            "uid-m-0": Sample(phase="failed", ranks=leader),
            "uid-m-0-1": Sample(phase="loading", ranks=worker),
        }
        found: int | None = compute(*pods, samples=samples)["groups"][0].get("slowestRank")
        return found

    assert named(ranks[0], seen) == 1
    assert named(ranks[0], seen, worker=(ranks[1],)) == 1, "each rank counts once, with what either says"
    behind = replace(ranks[1], last_step=8)
    assert named(ranks[0], behind, worker=(ranks[1],)) is None, "its echo is on the way"
    slow = replace(ranks[1], step_micros=50_000)
    assert named(replace(ranks[0], step_micros=9_000), slow) == 1
    assert named(replace(ranks[0], step_micros=30_000), slow) is None, "stages differ a little"
    assert named(*ranks) is None


@pytest.mark.parametrize(
    ("fields", "expected", "said"),
    [
        ({"parallelism": {"authSecretRef": {"name": "ranks"}}}, ("True", "KeyOfSecret"), "Secret ranks"),
        ({"security": {"apiKeysSecretRef": {"name": "keys"}}}, ("True", "KeyOfAPIKeys"), "Secret keys"),
        ({}, ("False", "RanksUnauthenticated"), "NetworkPolicy alone"),
        (
            {"networking": {"networkPolicy": {"mode": "None"}}},
            ("False", "RanksUnauthenticated"),
            "no NetworkPolicy either",
        ),
    ],
)
def test_the_status_says_by_what_pods_of_a_group_know_each_other(
    fields: Body, expected: tuple[str, str], said: str
) -> None:
    computed = compute(member(kubelet.ready()), member(kubelet.ready(), worker=1), **fields)

    assert condition(computed, "RanksAuthenticated") == expected
    (found,) = [c for c in computed["conditions"] if c["type"] == "RanksAuthenticated"]
    assert said in found["message"]
    assert condition(computed, "Ready")[0] == "True", "it is a warning"


def test_one_pod_has_nobody_to_authenticate() -> None:
    assert not [c for c in single.compute()["conditions"] if c["type"] == "RanksAuthenticated"]


def test_groups_that_a_rollout_replaces_are_not_recreated() -> None:
    computed: Body = {}
    for life in range(6):
        revision = f"{life:010d}"
        pods = [
            member(kubelet.loading(), worker=worker, uid=f"life-{life}", revision=revision)
            for worker in (0, 1)
        ]
        computed = compute(*pods, old=computed)

    assert "recreations" not in computed["groups"][0]
