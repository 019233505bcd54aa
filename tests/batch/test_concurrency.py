"""How many lines at once: one more after a round of successes, half where there is no room."""

from hypothesis import given
from hypothesis import strategies as st

from quire_batch.concurrency import Concurrency, after_refusal, after_success


def test_one_more_after_as_many_successes_as_there_may_be_in_flight():
    state, limits = Concurrency(), []
    for _ in range(6):
        state = after_success(state, 64)
        limits.append(state.limit)
    assert limits == [2, 2, 3, 3, 3, 4]


def test_a_refusal_halves_it_once_for_all_that_was_in_flight_and_makes_it_wait():
    state = after_refusal(Concurrency(limit=16), begun_at=90.0, now=100.0, retry_after=0.0)
    assert (state.limit, state.room(0, 100.5), state.room(0, 101.0)) == (8, 0, 8)
    assert after_refusal(state, begun_at=95.0, now=100.2, retry_after=0.0) == state
    again = after_refusal(state, begun_at=101.5, now=102.0, retry_after=0.0)
    assert (again.limit, again.room(0, 103.9), again.room(0, 104.0)) == (4, 0, 4), "it waits longer"
    assert after_success(again, 64).pause == 0.0


def test_it_waits_as_long_as_the_gateway_asks_for_but_not_for_ever():
    state = after_refusal(Concurrency(), 0.0, 100.0, retry_after=7.0)
    assert (state.limit, state.paused_until) == (1, 107.0)
    assert after_refusal(Concurrency(), 0.0, 100.0, retry_after=3600.0).paused_until == 130.0


@given(st.lists(st.booleans(), max_size=300), st.integers(1, 40))
def test_it_stays_between_one_and_the_highest(outcomes, most):
    state, now = Concurrency(), 0.0
    for is_success in outcomes:
        now += 40.0
        before = state.limit
        state = after_success(state, most) if is_success else after_refusal(state, now - 1, now, 0.0)
        assert 1 <= state.limit <= most
        assert state.limit <= before + 1
        assert state.room(state.limit + 3, now) == 0
