"""What Prefix is for, on a small version of the simulation of bench/results/gateway_routing.md."""

import functools

import pytest

from bench.gateway_simulator import POLICIES, TRACES, b2b, no_reuse, simulate


def outcome(trace, policy, seconds):
    new_router, gateways, sync = POLICIES[policy]
    return simulate(trace, new_router, gateways, sync=sync, seconds=seconds)


def test_three_gateways_hit_three_times_as_often_as_round_robin_and_answer_in_a_third_of_the_time():
    turns, prefix = (outcome(b2b, name, 100) for name in ("RoundRobin (3)", "**Prefix, sync (3)**"))
    assert prefix.hit >= 3 * turns.hit
    assert prefix.p90 <= 0.3 * turns.p90
    assert prefix.hit <= prefix.ideal


def test_three_gateways_hit_nearly_as_often_as_one():
    one, three = (outcome(b2b, name, 100) for name in ("Prefix (1)", "**Prefix, sync (3)**"))
    assert three.hit >= 0.9 * one.hit


@pytest.mark.parametrize("load", [0.5, 0.85])
def test_prompts_that_do_not_repeat_wait_no_longer_than_with_power_of_two(load):
    trace = functools.partial(no_reuse, load=load)
    two, prefix = (outcome(trace, name, 150) for name in ("PowerOfTwo (3)", "**Prefix, sync (3)**"))
    assert prefix.p90 <= 1.05 * two.p90
    assert prefix.skew <= 1.15


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_the_same_seed_gives_the_same_numbers(trace):
    one, other = (outcome(trace, "**Prefix, sync (3)**", 10) for _ in range(2))
    assert one == other
