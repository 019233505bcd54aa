"""Admission: which requests a long prompt delays, and which ones a request that waits for the disk delays."""

from collections.abc import Callable

import pytest

from quire_server.core.config import Batching
from quire_server.core.policy import CLASSES, TOP_PRIORITY, Policy
from quire_server.core.scheduler import Scheduler
from quire_server.core.step import Step
from tests.server.core.fake_runner import EOS, FakeRunner, answer, config, drain, request

LONG = [i % 50 for i in range(1000)]


def engine(clock: Callable[[], float] = lambda: 0.0, **changes: object) -> tuple[Scheduler, FakeRunner]:
    settings = config(**changes)
    return Scheduler(settings, eos_token_ids=[EOS], clock=clock), FakeRunner(settings)


def run(scheduler: Scheduler, runner: FakeRunner) -> Step:
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, runner.run(step))
    scheduler.check()
    return step


def rows_of(step: Step) -> list[str]:
    return [row.request_id for row in step.started]


def long_prompt(
    policy: Policy, priority: int, clock: Callable[[], float] = lambda: 0.0, **more: object
) -> tuple[Scheduler, FakeRunner]:
    """A prompt of 1,000 tokens is being computed, 16 tokens per step."""
    scheduler, runner = engine(clock, policy=policy, num_blocks=400, max_model_len=1200, **more)
    scheduler.add(request("long", LONG, 3, priority=priority))
    run(scheduler, runner)
    return scheduler, runner


@pytest.mark.parametrize(
    ("policy", "priority"),
    [(Policy.PRIORITY, CLASSES["high"])] + [(policy, TOP_PRIORITY) for policy in Policy],
)
def test_an_urgent_request_does_not_wait_for_the_end_of_a_long_prompt(policy: Policy, priority: int) -> None:
    scheduler, runner = long_prompt(policy, CLASSES["normal"])
    scheduler.add(request("urgent", [1, 2, 3], 5, arrival=1.0, priority=priority))
    step = run(scheduler, runner)
    assert rows_of(step) == ["urgent"] and sorted(step.num_tokens) == [3, 13], "the prompt gets what is left"
    tokens, last = drain(scheduler, runner)
    assert list(last) == ["urgent", "long"]
    assert tokens["long"] == answer(LONG, 3)


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.SJF])
def test_no_other_policy_lets_a_new_request_share_a_running_prompts_steps(policy: Policy) -> None:
    scheduler, runner = long_prompt(policy, CLASSES["normal"])
    scheduler.add(request("short", [1], 1, arrival=1.0))
    assert run(scheduler, runner).num_tokens == (16,)


def test_a_request_behind_a_long_prompt_in_the_order_does_not_share_its_steps() -> None:
    scheduler, runner = long_prompt(Policy.PRIORITY, CLASSES["normal"])
    scheduler.add(request("high, but late", [1], 1, arrival=101.0, priority=CLASSES["high"]))
    scheduler.add(request("low", [1], 1, arrival=0.0, priority=CLASSES["low"]))
    assert run(scheduler, runner).num_tokens == (16,)


def test_a_static_batch_computes_its_prompts_first() -> None:
    scheduler, runner = long_prompt(Policy.PRIORITY, CLASSES["low"], batching=Batching.STATIC)
    scheduler.add(request("high", [1], 1, arrival=1.0, priority=CLASSES["high"]))
    assert run(scheduler, runner).num_tokens == (16,)


def test_many_urgent_prompts_delay_a_long_one_by_at_most_the_aging_bound() -> None:
    second = 0
    scheduler, runner = long_prompt(Policy.PRIORITY, CLASSES["low"], clock=lambda: float(second))
    head_start = int(CLASSES["low"] - CLASSES["high"]) * 10
    sizes = []
    for second in range(1, head_start + 100):
        flood = request(f"high{second}", [second % 50] * 16, 1, float(second), priority=CLASSES["high"])
        scheduler.add(flood)
        step = run(scheduler, runner)
        sizes.append(0 if rows_of(step) else step.num_tokens[0])
    assert not any(sizes[: head_start - 1]) and sizes[head_start : head_start + 60] == [16] * 60


def low_priority_steps(*events: tuple[float, str, int], num_steps: int) -> list[tuple[int, ...]]:
    """The tokens of each row in each of the steps, one a second. The prompts of two requests of low priority
    are long, and requests come at the second, with the name and the priority of each event.
    """
    second = 0.0
    scheduler, runner = engine(
        lambda: second, policy=Policy.PRIORITY, num_blocks=400, max_model_len=1200, max_num_batched_tokens=320
    )
    for name in ("low", "also low"):
        scheduler.add(request(name, LONG, 3, priority=CLASSES["low"]))
    steps, waiting = [], list(events)
    while len(steps) < num_steps:
        while waiting and waiting[0][0] <= second:
            arrival, name, priority = waiting.pop(0)
            scheduler.add(request(name, [int(arrival)] * 20, 1, arrival=arrival, priority=priority))
        steps.append(tuple(run(scheduler, runner).num_tokens))
        second += 1.0
    return steps


def test_prompts_of_low_priority_fill_the_step_while_nothing_else_comes() -> None:
    assert low_priority_steps(num_steps=3) == [(320,)] * 3


@pytest.mark.parametrize("priority", [CLASSES["normal"], CLASSES["high"]])
def test_after_a_request_of_normal_priority_those_of_low_priority_make_short_steps(priority: int) -> None:
    steps = low_priority_steps((1.0, "first", priority), (4.0, "second", priority), num_steps=6)
    assert steps == [(320,), (20,), (10,), (10,), (20,), (10,)]


def test_half_a_minute_after_the_last_request_prompts_of_low_priority_fill_the_step_again() -> None:
    steps = low_priority_steps((1.0, "only", CLASSES["normal"]), num_steps=32)
    assert steps[2:31] == [(10,)] * 29 and sum(steps[31]) > 100


def test_health_checks_bound_no_prompt_of_low_priority() -> None:
    steps = low_priority_steps((1.0, "check", TOP_PRIORITY), num_steps=3)
    assert [sum(step) for step in steps] == [320] * 3


def test_without_the_policy_priority_low_priorities_change_no_step() -> None:
    scheduler, runner = engine(policy=Policy.FCFS, num_blocks=400, max_model_len=1200)
    scheduler.add(request("low", LONG, 3, priority=CLASSES["low"]))
    scheduler.add(request("normal", [1], 1))
    assert run(scheduler, runner).num_tokens == (16,)


def test_a_start_leaves_the_free_block_reserve_unless_nothing_else_runs() -> None:
    scheduler, runner = engine(num_blocks=16, free_block_reserve=0.25, max_num_batched_tokens=64)
    scheduler.add(request("running", range(19), 2))
    run(scheduler, runner)
    scheduler.add(request("large", [49] * 31, 1, arrival=1.0))  # 8 of the 11 blocks that are free
    assert rows_of(run(scheduler, runner)) == [], "three would be left of the sixteen"
    assert rows_of(run(scheduler, runner)) == ["large"], "no other request runs"
    scheduler.add(request("running again", range(19), 2))
    scheduler.add(request("as large as it may be", [49] * 27, 1, arrival=1.0))
    assert len(rows_of(run(scheduler, runner))) == 2, "four are left"


def on_disk(**changes: object) -> tuple[Scheduler, FakeRunner]:
    """The prompt [0] * 20 is on a disk that needs ten steps for a read; one request runs."""
    limits = {"num_blocks": 16, "max_model_len": 48, "num_host_slots": 6, "num_disk_slots": 60}
    scheduler, runner = engine(**(limits | {"max_num_batched_tokens": 64} | changes))
    for i in range(7):
        scheduler.add(request(f"w{i}", [i] * 20, 2))
        drain(scheduler, runner)
    assert scheduler.kv.stats().disk_used
    runner.disk.lag = 10
    scheduler.add(request("running", [9], 40))
    run(scheduler, runner)
    scheduler.add(request("far", [0] * 20 + [1], 2))
    return scheduler, runner


def test_a_read_from_the_disk_does_not_delay_other_requests() -> None:
    scheduler, runner = on_disk()
    scheduler.add(request("near", [49], 2))
    assert rows_of(run(scheduler, runner)) == ["near"]
    tokens = drain(scheduler, runner)[0]
    assert tokens["far"] == answer([0] * 20 + [1], 2)
    assert scheduler.kv.stats().disk_loaded


@pytest.mark.parametrize(
    "limits", [{"max_num_seqs": 3}, {"num_blocks": 14, "max_num_seqs": 8}], ids=["rows", "blocks"]
)
def test_requests_that_overtake_do_not_take_the_row_or_blocks_of_one_that_waits_for_the_disk(
    limits: dict[str, object],
) -> None:
    scheduler, runner = on_disk(**limits)
    runner.disk.lag = 2
    for i in range(8):
        scheduler.add(request(f"near{i}", [40 + i] * 9, 30))
    started = rows_of(run(scheduler, runner))
    assert started and set(started) <= {"near0", "near1"}
    started = [name for _ in range(4) for name in rows_of(run(scheduler, runner))]
    assert started[0] == "far", "it kept its place, and starts as soon as it can"


def test_a_static_batch_waits_for_the_disk() -> None:
    scheduler, runner = on_disk(batching=Batching.STATIC)
    scheduler.abort("running")
    scheduler.add(request("near", [49], 2))
    assert rows_of(run(scheduler, runner)) == []
    while not (started := rows_of(run(scheduler, runner))):
        pass
    assert started == ["far", "near"]
