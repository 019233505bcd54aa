"""The lines in flight of one worker: what is not meant to happen is not swallowed, and turns are taken."""

import asyncio
import json

import pytest
import sqlalchemy as sa

from quire_batch.line_runner import LineRunner
from quire_batch.metrics import Metrics
from quire_batch.outcome import MAX_LOSSES, Answer
from quire_batch.patience import Patience
from quire_batch.records import LineState, Running, Work
from quire_batch.settings import Settings
from quire_batch.space import Space

ENDS = ("done", "failed", "error")


class FakeStore:
    """Batches with one line each. ``finish``: what happens when one is done."""

    def __init__(self, finish, batches=("a",), losses=0):
        self.losses = losses
        self.finished = []
        self.left = list(batches)
        self.taken = []
        self._batches = batches
        self._finish = finish

    def running(self):
        return [Running(one, "alice", is_job=False) for one in self._batches]

    def take_lines(self, batch_id, worker, number, now, lease_until):
        self.taken.append(batch_id)
        if batch_id not in self.left:
            return []
        self.left.remove(batch_id)
        common = {"number": 1, "endpoint": "/v1/completions", "delegation": "", "body": b"{}"}
        return [Work(batch_id=batch_id, **common, take=1, failures=0, losses=self.losses)]

    def finish_line(self, *args):
        self.finished.append(args)
        return self._finish()


class FakeGateway:
    async def ask(self, work):
        return Answer(200, "id", b"{}", {})


def runner(store, tmp_path, concurrency=4):
    settings = Settings(
        gateway_url="", keys_directory=tmp_path, directory=tmp_path, worker="w", concurrency=concurrency
    )
    metrics = Metrics(lambda: ({}, None))
    wake = asyncio.Event()
    made = LineRunner(store, Space(None), FakeGateway(), metrics, settings, "w", Patience(metrics), wake.set)
    return made, wake, metrics


async def test_an_error_that_is_no_store_s_ends_the_worker(tmp_path):
    def finish():
        raise ValueError("a mistake of ours")

    made, wake, _ = runner(FakeStore(finish), tmp_path)
    await made.take()
    await wake.wait()
    with pytest.raises(ValueError, match="a mistake of ours"):
        await made.take()


async def test_an_answer_is_kept_while_the_store_fails(tmp_path):
    failures = iter([sa.exc.OperationalError("INSERT", {}, Exception("disk full"))])

    def finish():
        for error in failures:
            raise error
        return True

    made, wake, metrics = runner(FakeStore(finish), tmp_path)
    await made.take()
    await wake.wait()
    assert metrics.registry.get_sample_value("batch_store_errors_total") == 1
    assert metrics.registry.get_sample_value("batch_lines_total", {"status": "done"}) == 1


async def test_a_line_that_three_workers_died_with_fails_and_is_not_asked_for(tmp_path):
    store = FakeStore(lambda: True, losses=MAX_LOSSES)
    made, wake, metrics = runner(store, tmp_path)
    await made.take()
    assert made.held() == {"a": [(1, 1)]}
    await wake.wait()
    ((_, _, state, result, _),) = store.finished
    assert state is LineState.FAILED
    assert json.loads(result)["body"]["error"]["code"] == "line_lost"
    ended = {one: metrics.registry.get_sample_value("batch_lines_total", {"status": one}) for one in ENDS}
    assert ended == {"done": 0, "failed": 0, "error": 1}, "it is not the line's own fault"
    assert made.held() == {}


async def test_batches_take_turns_in_being_first(tmp_path):
    store = FakeStore(lambda: True, batches=("a", "b", "c"))
    made, _, _ = runner(store, tmp_path)
    first = set()
    for _ in range(3):
        store.taken.clear()
        await made.take()
        first.add(store.taken[0])
        await made.end(1.0)
    assert first == {"a", "b", "c"}
