"""The work of one worker: what fails at one batch keeps no other one waiting."""

import asyncio
from dataclasses import replace

import sqlalchemy as sa

from quire_batch.contents import Contents, ContentsError
from quire_batch.line_runner import LineRunner
from quire_batch.metrics import Metrics
from quire_batch.outcome import Answer
from quire_batch.patience import Patience
from quire_batch.processor import Processor
from quire_batch.records import Batch, File, LineState, Status, incarnation
from quire_batch.schema import prepare
from quire_batch.settings import Settings
from quire_batch.space import Space
from quire_batch.store import Store
from quire_batch.tables import connect
from tests.batch.launch import CHAT, jsonl, line

OWNER = "models/alice"


class Clock:
    def __init__(self):
        self.now = 1_000.0

    def __call__(self):
        return self.now


class HalfBroken:
    """Contents of which files of these ids cannot be written or read. ``tried``: how often it was."""

    def __init__(self, whole):
        self.broken, self.tried = "", 0
        self._whole = whole

    def write(self, id_, parts):
        self._check(id_)
        return self._whole.write(id_, parts)

    def read(self, id_):
        self._check(id_)
        return self._whole.read(id_)

    def delete(self, id_):
        self._whole.delete(id_)

    def _check(self, id_):
        if self.broken and self.broken in id_:
            self.tried += 1
            raise ContentsError("Generic S3 error: 503 Slow Down")


class FakeGateway:
    async def ask(self, work):
        return Answer(200, "id", b"{}", {})


class Worker:
    """One that runs, on SQLite, with a clock that stands still."""

    def __init__(self, directory):
        self.clock = Clock()
        self.contents = HalfBroken(Contents.in_directory(directory / "files"))
        self._engine = connect(f"sqlite:///{directory / 'batches.sqlite'}")
        prepare(self._engine)
        self.store = Store(self._engine)
        settings = Settings(gateway_url="", keys_directory=directory, directory=directory, worker="w")
        self.metrics = metrics = Metrics(self.store.counts)
        patience, space, name, wake = Patience(metrics), Space(None), incarnation("w"), asyncio.Event()
        runner = LineRunner(
            *(self.store, space, FakeGateway(), metrics, settings, name, patience, wake.set, self.clock)
        )
        self.processor = Processor(
            *(self.store, self.contents, space, runner, metrics, settings, name, patience, wake, self.clock)
        )

    async def __aenter__(self):
        self._task = asyncio.create_task(self.processor.run())
        return self

    async def __aexit__(self, *exception):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._engine.dispose()

    def write(self, name, number):
        """A file of so many lines; its length."""
        return self.contents.write(f"file-{name}", [jsonl(*(line(n) for n in range(number)))])

    def submit(self, name, size):
        """A batch of a file of this length."""
        now = int(self.clock())
        more = {"filename": "f", "purpose": "batch", "created_at": now}
        self.store.add_file(File(id=f"file-{name}", owner=OWNER, bytes=size, **more), 1 << 20)
        values = {"endpoint": CHAT, "status": Status.VALIDATING, "delegation": "d", "created_at": now}
        ids = {"id": f"batch_{name}", "owner": OWNER, "input_file_id": f"file-{name}"}
        self.store.add(Batch(**values, **ids, expires_at=now + 10_000), 10)

    def batch(self, name):
        return self.store.batch(OWNER, f"batch_{name}")

    def break_once(self, statement, number):
        """The database fails at such a statement, the time of this number."""
        times = 0

        def fail(connection, cursor, text, parameters, context, many):
            nonlocal times
            times += statement in text
            if statement in text and times == number:
                raise sa.exc.OperationalError(text, {}, OSError("disk I/O error"))

        sa.event.listen(self._engine, "before_cursor_execute", fail)

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                assert not self._task.done(), self._task.result()
                await asyncio.sleep(0.01)  # between two looks at what threads do


async def test_a_batch_that_cannot_be_finalized_is_put_off_and_others_end_meanwhile(tmp_path):
    async with Worker(tmp_path) as worker:
        worker.contents.broken = "broken-output"
        worker.submit("broken", worker.write("broken", 3))
        await worker.until(lambda: worker.contents.tried)
        worker.submit("sound", worker.write("sound", 3))
        await worker.until(lambda: worker.batch("sound").status is Status.COMPLETED)
        left = worker.batch("broken")
        assert (left.status, left.completed, left.output_file_id) == (Status.FINALIZING, 3, "")
        assert worker.contents.tried == 1, "it is left alone for half a minute"
        assert worker.metrics.registry.get_sample_value("batch_store_errors_total") == 1

        worker.contents.broken = ""
        worker.clock.now += 31
        await worker.until(lambda: worker.batch("broken").status is Status.COMPLETED)
        output = b"".join(worker.contents.read(worker.batch("broken").output_file_id))
        assert output.count(b"\n") == 3, "nothing of it is lost"


async def test_a_batch_whose_lines_are_deleted_in_part_keeps_its_files_and_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("quire_batch.store._ROWS_AT_ONCE", 2)
    async with Worker(tmp_path) as worker:
        worker.break_once("DELETE FROM lines WHERE lines.batch_id =", 2)
        worker.submit("one", worker.write("one", 5))
        await worker.until(lambda: worker.metrics.registry.get_sample_value("batch_store_errors_total"))
        left = worker.batch("one")
        assert left.status is Status.FINALIZING
        assert len(list(worker.store.results("batch_one", tuple(LineState)))) == 3
        worker.contents.broken = "one-output"  # it is not written once more: some lines are gone
        worker.clock.now += 31
        await worker.until(lambda: worker.batch("one").status is Status.COMPLETED)
        assert not worker.contents.tried
        worker.contents.broken = ""
        output = b"".join(worker.contents.read(worker.batch("one").output_file_id))
        assert output.count(b"\n") == 5
        assert not list(worker.store.results("batch_one", tuple(LineState)))


async def test_a_batch_whose_file_is_gone_fails_and_says_so(tmp_path):
    async with Worker(tmp_path) as worker:
        worker.submit("gone", 3)
        await worker.until(lambda: worker.batch("gone").status is Status.FAILED)
        assert [one["code"] for one in worker.batch("gone").details["errors"]] == ["file_not_found"]


async def test_a_batch_whose_file_cannot_be_read_now_is_put_off(tmp_path):
    async with Worker(tmp_path) as worker:
        size = worker.write("one", 3)
        worker.contents.broken = "file-one"
        worker.submit("one", size)
        await worker.until(lambda: worker.metrics.registry.get_sample_value("batch_store_errors_total"))
        assert worker.batch("one").status is Status.VALIDATING
        worker.contents.broken = ""
        worker.clock.now += 31
        await worker.until(lambda: worker.batch("one").status is Status.COMPLETED)


async def test_a_database_that_fails_at_a_look_for_lines_is_asked_again(tmp_path):
    async with Worker(tmp_path) as worker:
        worker.break_once("ORDER BY batches.created_at, batches.id", 1)
        worker.submit("one", worker.write("one", 3))
        await worker.until(lambda: worker.batch("one").status is Status.COMPLETED)
        assert worker.metrics.registry.get_sample_value("batch_store_errors_total") == 1


async def test_a_worker_that_finalizes_what_another_one_has_finalized_leaves_it_as_it_is(tmp_path):
    async with Worker(tmp_path) as worker:
        worker.submit("one", worker.write("one", 3))
        await worker.until(lambda: worker.batch("one").status is Status.COMPLETED)
        over = worker.batch("one")
        late = replace(over, status=Status.FINALIZING, output_file_id="")
        await asyncio.to_thread(worker.processor._finalize, late)
        assert worker.batch("one") == over
        assert b"".join(worker.contents.read(over.output_file_id)).count(b"\n") == 3
