"""The queue gives a key to one worker at a time, however often it was added; the clock is a fake."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_operator.workqueue import WorkQueue
from tests.examples import examples


class FakeClock:
    """A loop's time and timers, moved only by `advance`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, FakeTimer]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[..., None], *args: object) -> FakeTimer:
        timer = FakeTimer(callback, args)
        heapq.heappush(self._timers, (self.now + delay, len(self._timers), timer))
        return timer

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            self.now, _, timer = heapq.heappop(self._timers)
            timer.fire()
        self.now = until


class FakeTimer:
    def __init__(self, callback: Callable[..., None], args: tuple[object, ...]) -> None:
        self._callback, self._args, self._cancelled = callback, args, False

    def cancel(self) -> None:
        self._cancelled = True

    def fire(self) -> None:
        if not self._cancelled:
            self._callback(*self._args)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def queue(clock: FakeClock) -> WorkQueue[str]:
    return WorkQueue(clock, jitter=lambda: 1.0)


async def given_out(queue: WorkQueue[str]) -> str | None:
    """What a worker gets at once, if anything."""
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    if worker.done():
        return worker.result()
    worker.cancel()
    return None


async def take_all(queue: WorkQueue[str]) -> list[str]:
    taken = []
    while (key := await given_out(queue)) is not None:
        taken.append(key)
    return taken


async def test_a_queued_key_is_returned_once_in_the_order_of_its_first_addition(
    queue: WorkQueue[str],
) -> None:
    for key in "abab":
        queue.add(key)

    assert await take_all(queue) == ["a", "b"]


async def test_a_key_in_processing_is_not_returned_again_before_done(queue: WorkQueue[str]) -> None:
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    queue.add("a")
    assert queue.depth == 0

    queue.done("a")
    assert await take_all(queue) == ["a"]
    queue.done("a")
    assert queue.depth == 0


async def test_a_waiting_worker_is_woken_by_an_addition(queue: WorkQueue[str]) -> None:
    waiting = [asyncio.create_task(queue.get()) for _ in range(2)]
    await asyncio.sleep(0)
    queue.add("a")
    queue.add("b")

    assert sorted(await asyncio.gather(*waiting)) == ["a", "b"]


async def test_the_earliest_of_several_delays_applies(queue: WorkQueue[str], clock: FakeClock) -> None:
    queue.add_after("a", 10)
    queue.add_after("a", 3)
    queue.add_after("a", 7)
    clock.advance(2.9)
    assert queue.depth == 0
    clock.advance(0.2)
    assert await take_all(queue) == ["a"]
    queue.done("a")

    clock.advance(60)
    assert queue.depth == 0


async def test_the_backoff_doubles_up_to_five_minutes_and_is_reset_by_forget(
    queue: WorkQueue[str], clock: FakeClock
) -> None:
    delays = []
    for _ in range(11):
        delays.append(queue.retry("a"))
        clock.advance(300)
    assert delays == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]

    queue.forget("a")
    assert queue.retry("a") == 1
    assert queue.retry("b") == 1, "keys have back-offs of their own"


def test_the_backoff_can_be_capped_and_has_jitter(clock: FakeClock) -> None:
    queue: WorkQueue[str] = WorkQueue(clock, jitter=lambda: 0.0)

    assert [queue.retry("a", most=3) for _ in range(4)] == [0.5, 1, 1.5, 1.5]


async def test_the_oldest_age_is_that_of_the_key_queued_longest(
    queue: WorkQueue[str], clock: FakeClock
) -> None:
    assert queue.oldest_age == 0
    queue.add("a")
    clock.advance(5)
    queue.add("b")
    clock.advance(2)
    assert queue.oldest_age == 7
    await queue.get()
    assert queue.oldest_age == 2


async def test_changed_keys_are_returned_before_background_resyncs(queue: WorkQueue[str]) -> None:
    for key in "abc":
        queue.add(key, background=True)
    queue.add("x")
    queue.add("b")
    queue.add("x", background=True)
    assert queue.depth == 4

    assert await take_all(queue) == ["x", "b", "a"]


async def test_background_resyncs_run_one_at_a_time_and_changed_keys_do_not_wait_for_them(
    queue: WorkQueue[str],
) -> None:
    for key in "abc":
        queue.add(key, background=True)
    assert await take_all(queue) == ["a"]
    queue.add("x")
    queue.add("c")
    assert await take_all(queue) == ["x", "c"]

    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.done("x")
    await asyncio.sleep(0)
    assert not waiting.done(), "a is still looked at"
    queue.done("a")
    assert await waiting == "b"


async def test_background_keys_count_in_depth_and_oldest_age(queue: WorkQueue[str], clock: FakeClock) -> None:
    queue.add("a", background=True)
    clock.advance(3)
    queue.add("a")
    queue.add("b", background=True)
    assert (queue.depth, queue.oldest_age) == (2, 3)


async def test_a_key_waits_for_others_of_its_group_and_holds_up_no_other_key(clock: FakeClock) -> None:
    queue: WorkQueue[str] = WorkQueue(clock, group=GROUPS.get)
    for key in "abc":
        queue.add(key)
    assert await take_all(queue) == ["a", "c"]
    assert (queue.depth, queue.oldest_age) == (1, 0)

    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.done("c")
    await asyncio.sleep(0)
    assert not waiting.done(), "a is in progress"
    queue.done("a")
    assert await waiting == "b"


async def test_a_key_that_has_changed_its_group_waits_for_those_of_the_new_one(clock: FakeClock) -> None:
    groups = dict(GROUPS)
    queue: WorkQueue[str] = WorkQueue(clock, group=groups.get)
    queue.add("a")
    assert await queue.get() == "a"
    groups["a"] = "another"
    queue.add("b")
    assert await take_all(queue) == [], "a still works in the group in which it began"
    groups["b"] = "third"
    assert await take_all(queue) == ["b"]


GROUPS = {"a": "pool", "b": "pool"}
ACTIONS = ["add", "look again", "get", "done"]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from("abc")), max_size=60))
def test_no_addition_is_lost_and_no_key_is_processed_twice_at_once(steps: list[tuple[str, str]]) -> None:
    """Against the plain statement of it: added after it was last given out = it will be given out again."""

    async def play() -> None:
        queue: WorkQueue[str] = WorkQueue(FakeClock(), group=GROUPS.get)
        owed: set[str] = set()
        changed: set[str] = set()
        working: set[str] = set()
        for action, key in steps:
            if action in ("add", "look again"):
                queue.add(key, background=action == "look again")
                owed.add(key)
                changed |= {key} if action == "add" else set()
            elif action == "get" and (got := await given_out(queue)) is not None:
                assert got not in working
                assert not {got, *working} >= GROUPS.keys(), "two of a group"
                assert got in owed
                owed.remove(got)
                changed.discard(got)
                working.add(got)
            elif action == "get":
                busy = {GROUPS[one] for one in working & GROUPS.keys()}
                free = {one for one in changed - working if GROUPS.get(one) not in busy}
                assert not free, "what changed never waits for what is looked at again"
            elif action == "done" and key in working:
                queue.done(key)
                working.remove(key)
        for key in working:
            queue.done(key)
        rest = set()
        while (last := await given_out(queue)) is not None:
            rest.add(last)
            queue.done(last)
        assert rest == owed

    asyncio.run(play())
