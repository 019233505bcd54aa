"""Which replicas are left alone for a while because they fail, and how they come back."""

import itertools

import pytest

from quire_gateway.outlier_detection import (
    BASE_SECONDS,
    CONSECUTIVE_FAILURES,
    MAX_SECONDS,
    OutlierDetection,
    Verdict,
)

PODS = ("a", "b", "c", "d")


@pytest.fixture
def outliers(clock):
    return OutlierDetection(clock)


def ask(outliers, uid, verdict, times=1, pods=PODS):
    for _ in range(times):
        outliers.begin(uid)
        outliers.end(uid, verdict, pods)


def eject(outliers, uid, pods=PODS):
    ask(outliers, uid, Verdict.FAILURE, CONSECUTIVE_FAILURES, pods)


def test_five_failures_in_a_row_eject_and_four_do_not(outliers):
    ask(outliers, "a", Verdict.FAILURE, CONSECUTIVE_FAILURES - 1)
    assert outliers.takes_requests("a")
    ask(outliers, "a", Verdict.FAILURE)
    assert not outliers.takes_requests("a")
    assert outliers.takes_requests("b")
    assert outliers.num_ejections == 1


def test_a_success_between_failures_ends_the_row(outliers):
    for _ in range(10):
        ask(outliers, "a", Verdict.FAILURE, CONSECUTIVE_FAILURES - 1)
        ask(outliers, "a", Verdict.SUCCESS)
    assert outliers.takes_requests("a")


def test_requests_that_say_nothing_neither_eject_nor_end_the_row(outliers):
    ask(outliers, "a", Verdict.FAILURE, CONSECUTIVE_FAILURES - 1)
    ask(outliers, "a", Verdict.UNKNOWN, 20)
    assert outliers.takes_requests("a")
    ask(outliers, "a", Verdict.FAILURE)
    assert not outliers.takes_requests("a")


def test_a_half_open_replica_is_tried_by_one_request_at_a_time(outliers, clock):
    eject(outliers, "a")
    clock.now += BASE_SECONDS
    assert outliers.takes_requests("a")
    outliers.begin("a")
    assert not outliers.takes_requests("a")
    outliers.end("a", Verdict.UNKNOWN, PODS)  # its client hung up
    assert outliers.takes_requests("a")


def test_a_half_open_replica_that_answers_is_back(outliers, clock):
    eject(outliers, "a")
    clock.now += BASE_SECONDS
    ask(outliers, "a", Verdict.SUCCESS)
    assert not outliers.is_ejected("a")
    outliers.begin("a")
    assert outliers.takes_requests("a")


def test_each_further_ejection_is_longer_up_to_a_bound(outliers, clock):
    eject(outliers, "a")
    for count in itertools.count(1):
        seconds = min(BASE_SECONDS * count, MAX_SECONDS)
        clock.now += seconds - 0.1
        assert not outliers.takes_requests("a")
        clock.now += 0.1
        assert outliers.takes_requests("a")
        if seconds == MAX_SECONDS:
            break
        ask(outliers, "a", Verdict.FAILURE)  # one is enough now


@pytest.mark.parametrize(("num_pods", "most"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_at_most_half_of_the_replicas_are_ejected(outliers, num_pods, most):
    pods = PODS[:num_pods]
    for uid in pods:
        eject(outliers, uid, pods)
        eject(outliers, uid, pods)
    assert sum(not outliers.takes_requests(uid) for uid in pods) == most


def test_requests_from_before_the_ejection_do_not_prolong_it(outliers, clock):
    for _ in range(20):
        outliers.begin("a")
    for _ in range(20):
        outliers.end("a", Verdict.FAILURE, PODS)
    clock.now += BASE_SECONDS
    assert outliers.takes_requests("a")


def test_a_pod_that_is_gone_is_forgotten(outliers):
    eject(outliers, "a")
    outliers.keep(("b",))
    assert outliers.takes_requests("a")
    outliers.end("a", Verdict.FAILURE, ("b",))  # its last request
    assert not outliers.is_ejected("a")
