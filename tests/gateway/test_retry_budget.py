"""Retries are a fifth of the requests in the long run, with a reserve for the loss of a replica."""

import pytest

from quire_gateway.retry_budget import RESERVE, RetryBudget


def test_when_every_request_fails_a_fifth_of_them_is_tried_again():
    budget = RetryBudget()
    retries = 0
    for _ in range(10_000):
        budget.add_request()
        retries += budget.take_retry()
    assert retries == pytest.approx(10_000 // 5 + RESERVE, abs=1)


def test_a_lost_replica_with_many_requests_is_made_up_for():
    budget = RetryBudget()
    assert all(budget.take_retry() for _ in range(RESERVE))
    assert not budget.take_retry()


def test_the_reserve_does_not_grow_without_bound():
    budget = RetryBudget()
    for _ in range(100_000):
        budget.add_request()
    assert sum(budget.take_retry() for _ in range(1000)) == RESERVE
