"""Retries are a fifth of the requests in the long run and one a second, with a reserve for a lost replica."""

import pytest

from quire_gateway.retry_budget import A_SECOND, RESERVE, RetryBudget


def spent():
    budget = RetryBudget()
    assert all(budget.take_retry(0.0) for _ in range(RESERVE))
    assert not budget.take_retry(0.0)
    return budget


def test_when_every_request_fails_a_fifth_of_them_is_tried_again():
    budget = RetryBudget()
    retries = 0
    for _ in range(10_000):
        budget.add_request()
        retries += budget.take_retry(0.0)
    assert retries == pytest.approx(10_000 // 5 + RESERVE, abs=1)


def test_a_lost_replica_with_many_requests_is_made_up_for():
    spent()


def test_the_reserve_does_not_grow_without_bound():
    budget = RetryBudget()
    for _ in range(100_000):
        budget.add_request()
    assert sum(budget.take_retry(1e6) for _ in range(1000)) == RESERVE


def test_time_brings_retries_back_so_that_few_long_streams_outlive_one_replica_after_the_other():
    budget, retries = spent(), 0
    for second in range(1, 601):
        retries += sum(budget.take_retry(float(second)) for _ in range(3))
    assert retries == 600 * A_SECOND


def test_a_clock_that_goes_back_brings_none():
    budget = spent()
    assert not budget.take_retry(-1000.0)
    assert not budget.take_retry(-1000.5)


def test_without_a_percentage_there_are_no_retries():
    budget = RetryBudget(0)
    budget.add_request()
    assert not budget.take_retry(0.0) and not budget.take_retry(1000.0)
