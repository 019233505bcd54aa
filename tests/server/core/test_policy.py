"""The order of requests under each policy, which ones are preempted, and that none waits for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_server.core.config import Batching
from quire_server.core.policy import (
    CLASSES,
    MAX_PRIORITY,
    MIN_PRIORITY,
    SECONDS_PER_LEVEL,
    TOP_PRIORITY,
    OutputLengthEstimator,
    Policy,
    max_head_start,
    virtual_arrival,
)
from quire_server.core.scheduler import Scheduler
from tests.examples import examples
from tests.server.core.fake_runner import EOS, FakeRunner, answer, config, drain, request


def engine(**changes: object) -> tuple[Scheduler, FakeRunner]:
    settings = config(**changes)
    return Scheduler(settings, eos_token_ids=[EOS]), FakeRunner(settings)


def run(scheduler: Scheduler, runner: FakeRunner, steps: int = 1) -> list[str]:
    """Run some steps; the ids of the requests that ended."""
    ended = []
    for _ in range(steps):
        step = scheduler.schedule()
        assert step is not None
        ended += [event.request_id for event in scheduler.commit(step, runner.run(step)) if event[3]]
        scheduler.check()
    return ended


def finish_order(scheduler: Scheduler, runner: FakeRunner) -> list[str]:
    """The ids of all requests in the order in which they end."""
    ended = []
    while scheduler.has_work:
        ended += run(scheduler, runner)
    return ended


def finish_order_for_one_row(policy: Policy, **requests: dict[str, object]) -> list[str]:
    """The order in which requests that wait for the same row end."""
    scheduler, runner = engine(policy=policy, max_num_seqs=1)
    for name, more in requests.items():
        scheduler.add(request(name, [1, 2], **more))  # type: ignore[arg-type]  # a dict of mixed values
    return list(drain(scheduler, runner)[1])


def test_first_come_first_served_depends_on_arrival_only() -> None:
    late, early = {"arrival": 5.0, "max_tokens": 1}, {"arrival": 4.0, "max_tokens": 9}
    assert finish_order_for_one_row(Policy.FCFS, late=late, early=early) == ["early", "late"]


def test_classes_and_levels_go_before_arrivals_and_lower_numbers_first() -> None:
    ranks = {"low": CLASSES["low"], "one": 1, "normal": 0, "two": 2, "high": CLASSES["high"]}
    queue = {name: {"priority": level} for name, level in ranks.items()}
    assert finish_order_for_one_row(Policy.PRIORITY, **queue) == ["high", "normal", "one", "two", "low"]


def test_ten_seconds_of_waiting_equal_one_priority_level() -> None:
    fresh, aged = {"arrival": 100.0, "priority": 0}, {"arrival": 100 - SECONDS_PER_LEVEL - 1, "priority": 1}
    assert finish_order_for_one_row(Policy.PRIORITY, fresh=fresh, aged=aged) == ["aged", "fresh"]


@pytest.mark.parametrize("policy", Policy)
def test_the_canary_is_first_under_every_policy(policy: Policy) -> None:
    urgent = {"arrival": -1e9, "priority": MIN_PRIORITY, "max_tokens": 1}
    canary = {"arrival": 9.0, "priority": TOP_PRIORITY, "max_tokens": 10}
    assert finish_order_for_one_row(policy, urgent=urgent, canary=canary) == ["canary", "urgent"]


def test_the_shortest_job_is_first_and_a_long_one_is_not_starved() -> None:
    jobs = {"long": {"max_tokens": 40}, "short": {"max_tokens": 2}}
    assert finish_order_for_one_row(Policy.SJF, **jobs) == ["short", "long"]
    assert finish_order_for_one_row(Policy.SJF, **jobs, much_later={"arrival": 60.0, "max_tokens": 1}) == [
        "short",
        "long",
        "much_later",
    ]


def test_answers_that_end_early_lower_the_estimate_for_similar_requests() -> None:
    lengths = OutputLengthEstimator()
    assert lengths.expect(10, 100) == 100, "nothing is known yet"
    assert lengths.expect(10, 100_000) == 256, "and most answers do not fill the context"
    for _ in range(50):
        lengths.learn(10, 500, 20)
        lengths.learn(1000, 500, 400)
    assert 15 < lengths.expect(12, 400) < 30
    assert lengths.expect(900, 300) == 300, "never more than was asked for"
    assert 20 < lengths.expect(100_000, 500) < 400, "an unknown kind is like all the others"


def test_a_preempted_answer_longer_than_its_estimate_is_no_longer_estimated_as_short() -> None:
    scheduler, runner = engine(policy=Policy.SJF, max_num_seqs=2, num_blocks=10)
    scheduler._queue._output_lengths.learn(1, 32, 2)  # such answers were short so far
    for name in ("first", "outlived"):
        scheduler.add(request(name, [1], 32))
    scheduler.add(request("short", [2], 2, arrival=1.0))
    assert finish_order(scheduler, runner) == ["short", "first", "outlived"]
    assert scheduler.stats.preemptions, "the two were to outgrow the cache"


def test_shortest_first_shortens_the_mean_wait_of_a_full_server() -> None:
    means = {}
    for policy in (Policy.FCFS, Policy.SJF):
        scheduler, runner = engine(policy=policy, max_num_seqs=2)
        for i in range(60):
            scheduler.add(request(f"r{i}", [i % 50], 40 if i % 4 == 0 else 3))
        ended: list[int] = []
        while scheduler.has_work:
            num_steps = scheduler._num_steps + 1
            ended += [num_steps] * len(run(scheduler, runner))
        means[policy] = sum(ended) / len(ended)
    assert means[Policy.SJF] < 0.6 * means[Policy.FCFS]


requests = st.lists(
    st.tuples(
        st.floats(0, 3000),  # arrival
        st.sampled_from([MIN_PRIORITY, *CLASSES.values(), 1, MAX_PRIORITY]),
        st.integers(1, 40),  # max_tokens
    ),
    min_size=2,
    max_size=12,
)


@given(st.sampled_from(Policy), requests, st.integers(1, 3), st.integers(10, 24), st.floats(1, 200))
@settings(max_examples=examples(150))
def test_no_request_is_overtaken_by_arrivals_after_the_bound(
    policy: Policy, arriving: list[tuple[float, int, int]], num_rows: int, num_blocks: int, pace: float
) -> None:
    """The clock advances by ``pace`` seconds per step."""
    scheduler, runner = engine(policy=policy, max_num_seqs=num_rows, num_blocks=num_blocks)
    queue = sorted((arrival, f"r{i}", level, n) for i, (arrival, level, n) in enumerate(arriving))
    arrivals, started, ended, now = {entry[1]: entry[0] for entry in queue}, set[str](), list[str](), 0.0
    while queue or scheduler.has_work:
        while queue and queue[0][0] <= now:
            arrival, name, level, max_tokens = queue.pop(0)
            scheduler.add(request(name, [1, 2], max_tokens, arrival, priority=level))
        now += pace
        if (step := scheduler.schedule()) is None:
            continue
        for row in step.started:
            started.add(row.request_id)
            behind = arrivals[row.request_id] - max_head_start(policy)
            assert all(arrivals[name] >= behind for name in set(arrivals) - started), "a request starves"
        ended += [e.request_id for e in scheduler.commit(step, runner.run(step)) if e.finish_reason]
        scheduler.check()
    assert sorted(ended) == sorted(arrivals)


def test_many_high_priority_requests_delay_a_low_one_by_at_most_the_bound() -> None:
    scheduler, runner = engine(policy=Policy.PRIORITY, max_num_seqs=2)
    scheduler.add(request("low", [1], 3, arrival=0.0, priority=CLASSES["low"]))
    head_start = (CLASSES["low"] - CLASSES["high"]) * SECONDS_PER_LEVEL
    for second in range(2 * int(head_start)):  # two arrive for each one that can be served
        for i in range(2):
            name = f"high-{second}-{i}"
            scheduler.add(request(name, [2], 2, arrival=float(second), priority=CLASSES["high"]))
        if "low" in run(scheduler, runner):
            break
    # The queue that had built up by then goes first; no request that came after the bound does.
    assert scheduler.num_waiting and head_start < second < 2 * head_start


def test_a_high_priority_preempts_the_last_low_one_and_answers_do_not_change() -> None:
    scheduler, runner = engine(policy=Policy.PRIORITY, max_num_seqs=2)
    for name in ("low1", "low2"):
        scheduler.add(request(name, [1, 2, 3], 20, priority=CLASSES["low"]))
    run(scheduler, runner, 3)
    scheduler.add(request("high", [9], 4, arrival=1.0, priority=CLASSES["high"]))
    scheduler.add(request("also low", [9], 4, arrival=1.0, priority=CLASSES["low"]))
    step = scheduler.schedule()
    assert step is not None and [row.request_id for row in step.started] == ["high"]
    scheduler.commit(step, runner.run(step))
    tokens, last = drain(scheduler, runner)
    assert list(last) == ["high", "low1", "low2", "also low"]
    assert scheduler.stats.preemptions == 1
    assert tokens["low2"] == answer([1, 2, 3], 20)[3:]


def test_a_high_priority_that_lacks_blocks_preempts_as_few_as_it_needs() -> None:
    scheduler, runner = engine(policy=Policy.PRIORITY, num_blocks=12, enable_prefix_caching=False)
    for i in range(3):
        scheduler.add(request(f"low{i}", range(12), 4, arrival=float(i), priority=CLASSES["low"]))
    run(scheduler, runner, 3)
    scheduler.add(request("high", range(16), 2, arrival=3.0, priority=CLASSES["high"]))
    step = scheduler.schedule()
    assert step is not None and [row.request_id for row in step.started] == ["high"]
    scheduler.commit(step, runner.run(step))
    assert scheduler.stats.preemptions == 1
    rest = drain(scheduler, runner)[0]["low2"]
    assert len(rest) > 1 and rest == answer(range(12), 4)[-len(rest) :]


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.SJF])
def test_only_the_priority_policy_preempts_for_a_row(policy: Policy) -> None:
    scheduler, runner = engine(policy=policy, max_num_seqs=1)
    scheduler.add(request("running", [1], 20, arrival=5.0))
    run(scheduler, runner)
    scheduler.add(request("earlier and shorter", [2], 1, arrival=0.0))
    drain(scheduler, runner)
    assert scheduler.stats.preemptions == 0


def test_a_priority_class_does_not_preempt_a_request_that_aged_past_it() -> None:
    scheduler, runner = engine(policy=Policy.PRIORITY, max_num_seqs=1)
    scheduler.add(request("old", [1], 20, arrival=0.0, priority=CLASSES["normal"]))
    run(scheduler, runner)
    scheduler.add(request("new", [2], 2, arrival=101.0, priority=CLASSES["high"]))
    assert list(drain(scheduler, runner)[1]) == ["old", "new"]


def test_a_static_batch_admits_no_request_until_all_have_finished() -> None:
    scheduler, runner = engine(batching=Batching.STATIC, max_num_seqs=2, max_num_batched_tokens=8)
    for name, length in (("a", 2), ("b", 9), ("c", 1)):
        scheduler.add(request(name, range(6), length))
    first = scheduler.schedule()
    assert first is not None and len(first.rows) == 2, "both fit into the batch"
    ended = [e.request_id for e in scheduler.commit(first, runner.run(first)) if e.finish_reason]
    while "b" not in ended:
        assert "c" not in ended
        ended += run(scheduler, runner)
    assert ended == ["a", "b"] and run(scheduler, runner) == ["c"]


def test_a_static_batch_waits_for_prompts_that_one_step_cannot_hold() -> None:
    scheduler, runner = engine(batching=Batching.STATIC, max_num_batched_tokens=4)
    for name in "abcd":
        scheduler.add(request(name, [ord(name)] * 4, 9))
    run(scheduler, runner, 5)
    assert scheduler.num_running == 4


def test_continuous_batching_needs_fewer_steps_than_static_for_uneven_answers() -> None:
    steps = {}
    for batching in Batching:
        scheduler, runner = engine(batching=batching, max_num_seqs=8, num_blocks=200)
        for i in range(64):
            scheduler.add(request(f"r{i}", [i], 50 if i % 8 == 0 else 5))
        steps[batching] = 0
        while scheduler.has_work:
            run(scheduler, runner)
            steps[batching] += 1
    assert steps[Batching.STATIC] > 3 * steps[Batching.CONTINUOUS]


def test_the_sort_key_of_a_request_never_changes() -> None:
    """The order of two requests does not depend on the time at which it is computed."""
    one, other = request("a", [1], arrival=1.0, priority=5), request("b", [1], arrival=2.0)
    assert virtual_arrival(Policy.PRIORITY, one, 3) > virtual_arrival(Policy.PRIORITY, other, 500)


def test_aborted_requests_leave_the_waiting_queue_even_if_never_first() -> None:
    scheduler, _ = engine(max_num_seqs=1)
    waiting = scheduler._queue.waiting
    scheduler.add(request("first", [1]))
    for i in range(1000):
        scheduler.add(request(f"r{i}", [1], arrival=1.0))
        scheduler.abort(f"r{i}")
    assert len(waiting._heap) < 10 and scheduler.num_waiting == 1
