"""Which adapters are on the device, and who waits for whom."""

import pytest

from quire_server.core.policy import CLASSES, Policy
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from tests.server.core.fake_runner import FakeRunner

A, B, C = 1, 2, 3
HIGH, NORMAL, LOW = CLASSES["high"], CLASSES["normal"], CLASSES["low"]


def make_scheduler(**limits):
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "num_blocks": 64}
    settings |= {"block_size": 4, "num_adapter_slots": 1, **limits}
    return Scheduler(SchedulerConfig(**settings), eos_token_ids=())


def add(scheduler, name, adapter, *, arrival=0.0, tokens=3, prompt=(5, 6), priority=0):
    request = Request(name, tuple(prompt), SamplingParams(tokens), arrival, priority=priority)
    scheduler.add(request, adapter=adapter, adapter_key=f"a{adapter}" if adapter else "")


def run(scheduler, after=lambda step: None, runner=None):
    """All steps: the names that each one starts, and what it loads."""
    runner = runner or FakeRunner(scheduler.config)
    starts, loads = [], []
    while (step := scheduler.schedule()) is not None:
        starts.append([row.request_id for row in step.started])
        loads += step.adapter_loads
        scheduler.commit(step, runner.run(step))
        scheduler.check()
        after(len(starts))
    return starts, loads


def test_a_request_without_a_slot_waits_and_holds_up_no_other():
    scheduler = make_scheduler()
    for name, adapter in (("a", A), ("b", B), ("base", 0), ("a2", A)):
        add(scheduler, name, adapter)
    starts, loads = run(scheduler)
    assert starts[0] == ["a", "base", "a2"] and ["b"] in starts[1:]
    assert loads == [(0, A), (0, B)]


def test_one_that_waits_for_a_slot_is_not_overtaken_for_ever():
    scheduler = make_scheduler()
    add(scheduler, "a0", A, tokens=4)
    add(scheduler, "b", B)
    number = 0

    def another(_):
        nonlocal number
        number += 1
        if number < 30:
            add(scheduler, f"a{number}", A, arrival=0.3 * number, tokens=4)

    starts, _ = run(scheduler, another)
    order = [name for names in starts for name in names]
    assert order.index("b") < 8 and len(order) == 31


def order_of(scheduler, after=lambda step: None):
    return [name for names in run(scheduler, after)[0] for name in names]


def test_one_of_low_priority_that_waits_for_a_slot_holds_up_none_of_higher_priority():
    scheduler = make_scheduler(policy=Policy.PRIORITY)
    add(scheduler, "a", A, tokens=20, priority=NORMAL)
    add(scheduler, "low", B, priority=LOW)
    running = []

    def after(step):
        if step == 2:
            add(scheduler, "a2", A, arrival=3.0, priority=NORMAL)
        running.append(scheduler.num_running)

    assert order_of(scheduler, after) == ["a", "a2", "low"]
    assert running[:4] == [1, 1, 2, 2], "a2 waited for the end of a"


def test_others_wait_no_longer_once_the_one_for_which_they_waited_is_dropped():
    scheduler, running = make_scheduler(), []
    add(scheduler, "a", A, tokens=20)
    add(scheduler, "b", B)

    def after(step):
        if step == 2:
            add(scheduler, "a2", A, arrival=3.0)
        if step == 4:
            scheduler.abort("b")
        running.append(scheduler.num_running)

    assert order_of(scheduler, after) == ["a", "a2"]
    assert running[2:6] == [1, 1, 2, 2], "a2 waited for the end of a"


def test_only_the_adapter_with_the_fewest_answers_gives_up_its_slot():
    scheduler = make_scheduler(num_adapter_slots=2)
    for name, adapter in (("a", A), ("b", B), ("b2", B), ("c", C)):
        add(scheduler, name, adapter, tokens=12)

    def after(step):
        if step == 2:
            add(scheduler, "a3", A, arrival=3.0)
            add(scheduler, "b3", B, arrival=3.0)

    assert order_of(scheduler, after) == ["a", "b", "b2", "b3", "c", "a3"]


def test_nothing_is_preempted_for_a_request_that_has_no_slot():
    scheduler, preemptions = make_scheduler(policy=Policy.PRIORITY, max_num_seqs=3), []
    add(scheduler, "a", A, tokens=8, priority=HIGH)
    for name in ("base", "base2"):
        add(scheduler, name, 0, tokens=12, priority=LOW)

    def after(step):
        if step == 2:
            add(scheduler, "b", B, arrival=3.0, priority=NORMAL)
        preemptions.append(scheduler.stats.preemptions)

    assert order_of(scheduler, after) == ["a", "base", "base2", "b"]
    assert not any(preemptions[:6])


def test_the_longest_unused_adapter_gives_its_slot():
    scheduler = make_scheduler(num_adapter_slots=2)
    loads = []
    for index, adapter in enumerate((A, B, A, C, A, B)):
        add(scheduler, str(index), adapter)
        loads += run(scheduler)[1]
    assert loads == [(0, A), (1, B), (1, C), (1, B)]


@pytest.mark.parametrize("ends", ["abort", "finish"])
def test_a_request_that_is_dropped_while_it_waits_for_a_slot_leaves_nothing(ends):
    scheduler = make_scheduler()
    add(scheduler, "a", A, tokens=6)
    add(scheduler, "b", B)
    dropped = []

    def drop(step):
        if step == 2:
            getattr(scheduler, ends)("b")
            dropped.append(scheduler.num_waiting)

    starts, loads = run(scheduler, drop)
    assert dropped == [0] and loads == [(0, A)] and not scheduler.has_work
    assert not scheduler.adapters.is_used(B)
    add(scheduler, "b2", B)
    assert run(scheduler)[1] == [(0, B)]


def test_blocks_are_shared_within_an_adapter_and_its_content_only():
    scheduler = make_scheduler(num_adapter_slots=3)
    runner, prompt, cached = FakeRunner(scheduler.config), tuple(range(3, 20)), []
    for name, adapter in (("1", A), ("2", A), ("3", B), ("4", 0), ("5", 0)):
        add(scheduler, name, adapter, prompt=prompt)
        before = scheduler.kv.stats().prefix_hits
        run(scheduler, runner=runner)
        cached.append(scheduler.kv.stats().prefix_hits - before)
    assert cached == [0, 16, 0, 0, 16]
