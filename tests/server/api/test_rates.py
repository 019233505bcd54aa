"""Requests and tokens of a minute, per client."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_server.api.errors import ApiError
from quire_server.api.rates import RateLimits, Rates


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def refused(rates, client="ann", prompt_tokens=0):
    with pytest.raises(ApiError) as caught:
        rates.enter(client, prompt_tokens)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    return dict(caught.value.headers)


def test_without_limits_everybody_may_always():
    rates = Rates(RateLimits(), Clock())
    for _ in range(1000):
        rates.enter("", 10**6)
    assert list(rates.headers("")) == []


def test_the_request_over_the_limit_is_told_when_to_come_again_and_then_gets_in():
    clock = Clock()
    rates = Rates(RateLimits(requests=6), clock)
    for _ in range(6):
        rates.enter("ann", 0)
    headers = refused(rates)
    assert headers["retry-after"] == "10"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    rates.enter("bob", 0)  # is nobody's neighbour
    clock.now += 10
    rates.enter("ann", 0)
    refused(rates)


def test_a_long_answer_is_paid_for_before_the_next_request():
    clock = Clock()
    rates = Rates(RateLimits(tokens=600), clock)
    rates.enter("ann", 100)
    rates.spend("ann", 1100)
    assert dict(rates.headers("ann"))["x-ratelimit-remaining-tokens"] == "0"
    assert refused(rates, prompt_tokens=0)["retry-after"] == "61"  # 600 in debt, at 10 a second
    clock.now += 61
    rates.enter("ann", 0)


def test_a_prompt_longer_than_a_minute_s_tokens_gets_in_when_the_client_has_rested():
    clock = Clock()
    rates = Rates(RateLimits(tokens=100), clock)
    rates.enter("ann", 5000)
    refused(rates)
    clock.now += 60 * 50
    rates.enter("ann", 5000)


def test_a_refused_request_costs_nothing():
    rates = Rates(RateLimits(requests=5, tokens=100), Clock())
    rates.enter("ann", 100)
    for _ in range(20):
        refused(rates, prompt_tokens=1)
    assert dict(rates.headers("ann"))["x-ratelimit-remaining-requests"] == "4"


@given(st.lists(st.floats(0, 30), max_size=60), st.integers(1, 1000))
def test_over_any_time_nobody_gets_more_than_a_bucket_and_what_flowed_in(pauses, limit):
    clock = Clock()
    rates = Rates(RateLimits(requests=limit), clock)
    begun, served = clock.now, 0
    for pause in pauses:
        clock.now += pause
        try:
            rates.enter("ann", 0)
            served += 1
        except ApiError:
            pass
        assert served <= limit + (clock.now - begun) * limit / 60 + 1e-6
