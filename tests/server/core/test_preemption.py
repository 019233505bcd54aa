"""Preemption by priority: the most urgent request starts at once, and no request is preempted in vain."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_server.core.policy import CLASSES, Policy
from quire_server.core.scheduler import Scheduler
from tests.examples import examples
from tests.server.core.fake_runner import EOS, FakeRunner, config, drain, is_error, request


def engine(**changes: object) -> tuple[Scheduler, FakeRunner]:
    settings = config(**({"policy": Policy.PRIORITY, "free_block_reserve": 0.0} | changes))
    return Scheduler(settings, eos_token_ids=[EOS]), FakeRunner(settings)


def run(scheduler: Scheduler, runner: FakeRunner) -> list[str]:
    """Run one step; the ids of the requests that started in it."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, runner.run(step))
    scheduler.check()
    return [row.request_id for row in step.started]


def fill(scheduler: Scheduler, runner: FakeRunner, prefix: list[int], count: int) -> None:
    """Start `count` low-priority requests, one block each, on a shared prefix."""
    for i in range(count):
        low = request(f"low{i}", [*prefix, 30 + i], 30, arrival=float(i), priority=CLASSES["low"])
        scheduler.add(low)
        run(scheduler, runner)


def test_blocks_that_victims_share_with_remaining_sequences_are_not_reclaimable() -> None:
    scheduler, runner = engine(num_blocks=12, max_num_batched_tokens=64)
    fill(scheduler, runner, list(range(24)), 4)
    scheduler.add(request("high", [40] * 15, 2, arrival=5.0, priority=CLASSES["high"]))
    assert run(scheduler, runner) == ["high"]
    # Four for it and one for low0's next token, less the two that are free; each low one has one to itself.
    assert scheduler.stats.preemptions == 3


@given(st.integers(8, 24), st.sampled_from([0, 8, 16, 24]), st.integers(1, 6), st.integers(0, 6), st.data())
@settings(max_examples=examples(300))
def test_an_urgent_request_at_the_head_of_the_queue_starts_in_the_next_step(
    num_blocks: int, num_shared: int, num_low: int, num_steps: int, data: st.DataObject
) -> None:
    """Whatever blocks are shared, and whichever sequence needs a block in the same step."""
    scheduler, runner = engine(num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=200)
    fill(scheduler, runner, list(range(num_shared)), num_low)
    for _ in range(num_steps):
        run(scheduler, runner)
    length = data.draw(st.integers(1, min(60, 4 * num_blocks - 4)))
    scheduler.add(request("high", [40] * length, 2, arrival=20.0, priority=CLASSES["high"]))
    assert run(scheduler, runner) == ["high"]
    drain(scheduler, runner)


def test_a_preempted_request_larger_than_the_cache_does_not_block_others() -> None:
    scheduler, runner = engine(num_blocks=8)
    scheduler.add(request("low", range(15), 30, arrival=0.0, priority=CLASSES["low"]))
    for _ in range(18):
        run(scheduler, runner)
    scheduler.add(request("high", [40], 2, arrival=1.0, priority=CLASSES["high"]))
    scheduler.add(request("normal", [41], 2, arrival=1000.0))
    last = drain(scheduler, runner, 20)[1]
    assert is_error(last["low"]) and "the whole cache holds 32" in str(last["low"].error)
    assert list(last) == ["high", "low", "normal"]


@pytest.mark.parametrize("arrival", [3.0, 1.0])
def test_a_new_request_ahead_of_one_that_does_not_fit_is_scheduled_at_once(arrival: float) -> None:
    policy = Policy.FCFS if arrival == 1.0 else Policy.PRIORITY
    scheduler, runner = engine(num_blocks=12, policy=policy)
    scheduler.add(request("running", range(16), 20, arrival=0.0, priority=CLASSES["high"]))
    scheduler.add(request("big", range(20, 56), 2, arrival=2.0))
    assert run(scheduler, runner) == ["running"]
    assert run(scheduler, runner) == []
    scheduler.add(request("small", [9], 2, arrival=arrival, priority=-1))
    assert run(scheduler, runner) == ["small"]
