"""Requests and tokens of a minute, per client."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_http.errors import ApiError
from quire_http.rate_limit import RateLimits, Rates, _Bucket


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def rates_of(limits, clock):
    return Rates(lambda client: limits, clock)


def refused(rates, client="ann", prompt_tokens=0):
    with pytest.raises(ApiError) as error:
        rates.charge(client, prompt_tokens)
    assert (error.value.status, error.value.code) == (429, "rate_limit_exceeded")
    return dict(error.value.headers)


def test_without_limits_no_request_is_refused():
    rates = rates_of(RateLimits(), Clock())
    for _ in range(1000):
        rates.charge("", 10**6)
    assert list(rates.headers("")) == []


def test_a_request_over_the_limit_is_refused_with_retry_after_and_then_allowed():
    clock = Clock()
    rates = rates_of(RateLimits(requests=6), clock)
    for _ in range(6):
        rates.charge("ann", 0)
    headers = refused(rates)
    assert headers["retry-after"] == "10"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    rates.charge("bob", 0)  # has a limit of its own
    clock.now += 10
    rates.charge("ann", 0)
    refused(rates)


def test_a_long_answer_delays_the_next_request_until_the_tokens_are_refilled():
    clock = Clock()
    rates = rates_of(RateLimits(tokens=600), clock)
    rates.charge("ann", 100)
    rates.spend("ann", 1100)
    assert dict(rates.headers("ann"))["x-ratelimit-remaining-tokens"] == "0"
    assert refused(rates, prompt_tokens=0)["retry-after"] == "61"  # 600 in debt, at 10 a second
    clock.now += 61
    rates.charge("ann", 0)


def test_a_prompt_longer_than_the_tokens_of_a_minute_is_allowed_after_a_pause():
    clock = Clock()
    rates = rates_of(RateLimits(tokens=100), clock)
    rates.charge("ann", 5000)
    refused(rates)
    clock.now += 60 * 50
    rates.charge("ann", 5000)


def test_a_refused_request_is_not_charged():
    rates = rates_of(RateLimits(requests=5, tokens=100), Clock())
    rates.charge("ann", 100)
    for _ in range(20):
        refused(rates, prompt_tokens=1)
    assert dict(rates.headers("ann"))["x-ratelimit-remaining-requests"] == "4"


@given(st.lists(st.floats(0, 30), max_size=60), st.integers(1, 1000))
def test_over_any_time_a_client_gets_at_most_a_full_bucket_and_the_refill(pauses, limit):
    clock = Clock()
    rates = rates_of(RateLimits(requests=limit), clock)
    begun, served = clock.now, 0
    for pause in pauses:
        clock.now += pause
        try:
            rates.charge("ann", 0)
            served += 1
        except ApiError:
            pass
        assert served <= limit + (clock.now - begun) * limit / 60 + 1e-6


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_servers_with_a_share_each_allow_together_what_the_limit_allows(share):
    clock, number = Clock(), round(1 / share)
    each = [rates_of(RateLimits(requests=60, tokens=6000, share=share), clock) for _ in range(number)]
    served = 0
    for _ in range(300):
        for rates in each:
            with contextlib.suppress(ApiError):
                rates.charge("ann", 10)
                served += 1
        clock.now += 1
    assert 300 + 60 - number <= served <= 300 + 60
    with contextlib.suppress(ApiError):
        each[0].charge("ann", 10)
    headers = refused(each[0])
    assert headers["x-ratelimit-limit-requests"] == "60", "the whole limit, as the client knows it"


def test_a_limit_that_changes_keeps_how_much_of_it_is_used():
    clock, limits = Clock(), {"ann": RateLimits(requests=10)}
    rates = Rates(lambda client: limits[client], clock)
    for _ in range(5):
        rates.charge("ann", 0)
    limits["ann"] = RateLimits(requests=20, tokens=100)
    for _ in range(10):
        rates.charge("ann", 0)
    refused(rates)
    limits["ann"] = RateLimits()
    rates.charge("ann", 10**6)


def test_a_request_does_not_look_at_all_clients_and_those_without_requests_are_forgotten(monkeypatch):
    num_looks = 0
    refill = _Bucket.refill

    def counted(bucket, now):
        nonlocal num_looks
        num_looks += 1
        refill(bucket, now)

    monkeypatch.setattr(_Bucket, "refill", counted)
    clock = Clock()
    rates = rates_of(RateLimits(requests=2), clock)
    for number in range(1000):
        rates.charge(f"client-{number}", 0)
    assert num_looks < 10 * 1000
    clock.now += 60
    for number in range(1000):
        rates.charge(f"another-{number}", 0)
    assert len(rates._buckets) == 1000
