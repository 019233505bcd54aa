"""Clients take turns on one thread: whose work is next, and what of it is dropped."""

import functools
import gc
import threading
import weakref

import pytest

from quire_server.text.fair_executor import FairExecutor


class Gate:
    """Work that notes when it begins, and ends when it may."""

    def __init__(self):
        self.begun = []
        self._may_end = threading.Semaphore(0)
        self._has_begun = threading.Semaphore(0)

    def work(self, name):
        def call():
            self.begun.append(name)
            self._has_begun.release()
            assert self._may_end.acquire(timeout=60)
            return name

        return call

    def wait_for_one(self):
        assert self._has_begun.acquire(timeout=60)

    def end(self, count=1):
        self._may_end.release(count)


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def executor():
    return FairExecutor("test")


def test_a_client_that_comes_late_is_next_however_much_another_one_has_waiting(executor, gate):
    futures = [executor.submit("alice", gate.work(f"alice-{number}")) for number in range(5)]
    gate.wait_for_one()
    for name in ("bob-0", "carol-0", "bob-1"):
        futures.append(executor.submit(name.partition("-")[0], gate.work(name)))
    gate.end(8)
    assert [future.result(20) for future in futures] == [
        *(f"alice-{number}" for number in range(5)),
        *("bob-0", "carol-0", "bob-1"),
    ]
    assert gate.begun == [
        *("alice-0", "bob-0", "carol-0", "alice-1", "bob-1"),
        *("alice-2", "alice-3", "alice-4"),
    ]


def test_work_that_was_cancelled_while_it_waited_is_neither_run_nor_kept(executor, gate):
    first = executor.submit("alice", gate.work("first"))
    gate.wait_for_one()
    waiting = [executor.submit(client, gate.work("never")) for client in ("alice", "bob", "bob")]
    last = executor.submit("bob", gate.work("last"))
    assert (executor.num_waiting("alice"), executor.num_waiting("bob")) == (1, 3)
    assert all(future.cancel() for future in waiting)
    assert (executor.num_waiting("alice"), executor.num_waiting("bob")) == (0, 1)
    gate.end(2)
    assert (first.result(20), last.result(20)) == ("first", "last")
    assert gate.begun == ["first", "last"]


def test_an_error_is_its_futures_and_the_next_work_runs(executor, gate):
    def fail():
        raise SystemExit("even this")

    failing, after = executor.submit("alice", fail), executor.submit("alice", gate.work("after"))
    gate.end()
    with pytest.raises(SystemExit, match="even this"):
        failing.result(20)
    assert after.result(20) == "after"


def test_with_two_threads_a_client_has_one_of_them(gate):
    executor = FairExecutor("test", 2)
    futures = [executor.submit("alice", gate.work(f"alice-{number}")) for number in range(3)]
    gate.wait_for_one()
    futures.append(executor.submit("bob", gate.work("bob-0")))
    gate.wait_for_one()
    assert gate.begun == ["alice-0", "bob-0"]
    gate.end(4)
    assert [future.result(20) for future in futures] == ["alice-0", "alice-1", "alice-2", "bob-0"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_work_held_is_freed_with_its_future(executor, fails):
    class Body:
        pass

    def work(body=None):
        assert not fails, "refused"
        return None

    body = Body()
    held = weakref.ref(body)
    gc.disable()
    try:
        future = executor.submit("alice", functools.partial(work, body))
        del body
        assert (future.exception(20) is not None) == fails
        executor.submit("bob", work).exception(20)  # the thread is past the first
        del future
        assert held() is None, "it waits for the collector"
    finally:
        gc.enable()
