"""A rank of a group is named as slow by several answers of its leader, and not by turns."""

from __future__ import annotations

import random

import pytest

from quire_operator.reports import RankReport
from quire_operator.slow_ranks import POLLS, SlowRank


def taken(slow: SlowRank, *polls: tuple[int, ...], first: int = 0) -> list[int | None]:
    """Which rank is named after each poll, of so many microseconds for each rank."""
    named: list[int | None] = []
    for step, times in enumerate(polls, first):
        slow.take(
            [RankReport(rank=rank, last_step=step, step_micros=each) for rank, each in enumerate(times)]
        )
        named.append(slow.rank)
    return named


def test_a_rank_that_is_slow_is_named_after_several_polls_until_it_has_recovered() -> None:
    slow = SlowRank()
    assert taken(slow, *[(10, 11, 30, 10)] * POLLS) == [None] * (POLLS - 1) + [2]
    after = taken(slow, *[(10, 11, 10, 10)] * POLLS, first=POLLS)
    assert after[0] == 2 and after[-1] is None


@pytest.mark.parametrize("factor", [1.3, 1.45])
def test_between_the_two_bounds_nothing_changes(factor: float) -> None:
    """So a rank that is about that slow does not come and go."""
    between = [(1000, int(1000 * factor))] * (3 * POLLS)
    fresh, named = SlowRank(), SlowRank()
    assert set(taken(fresh, *between)) == {None}
    taken(named, *[(1000, 2000)] * POLLS)
    assert set(taken(named, *between, first=POLLS)) == {1}


def test_single_late_steps_name_none() -> None:
    draw = random.Random(1)
    slow = SlowRank()
    polls = []
    for number in range(200):
        times = [draw.randrange(900, 1100) for _ in range(4)]
        if number % 3 == 0:  # another rank each time
            times[number % 4] *= 10
        polls.append(tuple(times))
    assert set(taken(slow, *polls)) == {None}


def test_an_idle_group_says_nothing_new() -> None:
    slow, last = SlowRank(), [RankReport(rank=0, last_step=7, step_micros=10)]
    last.append(RankReport(rank=1, last_step=7, step_micros=90))
    for _ in range(10 * POLLS):
        slow.take(last)
    assert slow.rank is None, "one step is one observation, however often it is reported"


def test_stages_that_have_computed_nothing_yet_and_single_ranks_are_left_out() -> None:
    assert set(taken(SlowRank(), *[(10, 0)] * (2 * POLLS))) == {None}
    assert set(taken(SlowRank(), *[(10,)] * (2 * POLLS))) == {None}
    assert set(taken(SlowRank(), *[()] * POLLS)) == {None}


def test_a_second_slow_rank_does_not_take_the_name_of_the_first() -> None:
    slow = SlowRank()
    taken(slow, *[(10, 10, 10, 10, 30)] * POLLS)
    assert set(taken(slow, *[(10, 10, 10, 31, 30)] * (2 * POLLS), first=POLLS)) == {4}


def test_other_ranks_begin_anew() -> None:
    slow = SlowRank()
    taken(slow, *[(10, 30)] * POLLS)
    assert slow.rank == 1
    assert taken(slow, (10, 10, 10), first=POLLS) == [None]
