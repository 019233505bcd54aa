"""Which adapters are on the device, and who waits for whom."""

import pytest

from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from tests.server.core.fake_runner import FakeRunner

A, B, C = 1, 2, 3


def make_scheduler(**limits):
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "num_blocks": 64}
    settings |= {"block_size": 4, "num_adapter_slots": 1, **limits}
    return Scheduler(SchedulerConfig(**settings), eos_token_ids=())


def add(scheduler, name, adapter, *, arrival=0.0, tokens=3, prompt=(5, 6)):
    request = Request(name, tuple(prompt), SamplingParams(tokens), arrival)
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
