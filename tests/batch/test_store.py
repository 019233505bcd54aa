"""Who has a line, and whose result counts, in SQLite and in PostgreSQL alike."""

import threading
import tracemalloc
import weakref

import pytest
import sqlalchemy as sa

from quire_batch.lines import Line
from quire_batch.records import Batch, File, LineState, Status, new_id
from quire_batch.schema import prepare
from quire_batch.store import BusyFileError, MissingFileError, QuotaError, Store
from quire_batch.tables import connect

NOW = 1_000.0


def prepared(url):
    """The engine of a database with its tables."""
    engine = connect(url)
    prepare(engine)
    return engine


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request, tmp_path):
    if request.param == "sqlite":
        engine = prepared(f"sqlite:///{tmp_path / 'batches.sqlite'}")
    else:
        engine = prepared(request.getfixturevalue("postgres").url)
        with engine.begin() as connection:
            connection.execute(sa.text("TRUNCATE files, batches, lines"))
    yield Store(engine)
    engine.dispose()


class Body:
    """A line with a body of a mebibyte, of which it is seen whether it is still in memory."""

    def __init__(self, number):
        self.number, self.custom_id, self.prefix = number, str(number), b"%d" % number
        self.body = b"x" * (1 << 20)


def batch(**more):
    values = {
        "id": new_id("batch_"),
        "owner": "models/alice",
        "endpoint": "/v1/completions",
        "status": Status.VALIDATING,
        "delegation": "d",
        "created_at": int(NOW),
        "expires_at": int(NOW) + 100,
    }
    return Batch(**{**values, **more})


def running(store, number=3):
    """A batch of so many lines that wait."""
    made = batch()
    store.add(made, 10)
    taken = store.take_batch([Status.VALIDATING], "one", NOW, NOW + 60)
    assert taken == made
    assert store.take_batch([Status.VALIDATING], "two", NOW, NOW + 60) is None, "it is taken"
    found = (Line(n, f"line-{n}", b'{"n": %d}' % n, b"%d" % (9 - n)) for n in range(1, number + 1))
    assert store.accept(made, "one", store.add_lines(made, "one", found), NOW)
    return made.id


def a_file(**more):
    values = {"id": "file-1", "owner": "models/alice", "filename": "f", "purpose": "batch", "bytes": 1}
    return File(**{**values, "created_at": int(NOW), **more})


def test_lines_are_taken_in_the_order_of_their_prefix_and_by_one_worker_each(store):
    id_ = running(store)
    first = store.take_lines(id_, "one", 2, NOW, NOW + 60)
    assert [work.number for work in first] == [3, 2]
    assert [work.number for work in store.take_lines(id_, "two", 2, NOW, NOW + 60)] == [1]
    assert store.take_lines(id_, "two", 2, NOW, NOW + 60) == []
    assert first[0].body == b'{"n": 3}' and first[0].delegation == "d"


def test_what_a_worker_writes_after_it_has_lost_a_line_is_dropped(store):
    id_ = running(store, 1)
    (lost,) = store.take_lines(id_, "one", 1, NOW, NOW + 60)
    assert store.free_lost_lines("two", NOW + 59, {}) == 0
    assert store.free_lost_lines("one", NOW + 61, {id_: [(1, 1)]}) == 0, "what this worker has it has"
    assert store.free_lost_lines("two", NOW + 61, {}) == 1
    (again,) = store.take_lines(id_, "two", 1, NOW + 61, NOW + 120)
    assert not store.finish_line(lost, "one", LineState.DONE, b'"late"', NOW + 62)
    store.put_back(lost, "one", 0.0, 1)
    assert store.finish_line(again, "two", LineState.DONE, b'"right"', NOW + 63)
    assert not store.finish_line(again, "two", LineState.DONE, b'"twice"', NOW + 64)
    over = store.batch("models/alice", id_)
    assert (over.completed, over.failed, over.status) == (1, 0, Status.FINALIZING)
    assert [one.result for one in store.results(id_, (LineState.DONE,))] == [b'"right"']


def test_a_line_that_the_same_worker_took_twice_counts_for_the_second_time_alone(store):
    """As after a crash, when an answer to the first process's request could still come."""
    id_ = running(store, 1)
    (before,) = store.take_lines(id_, "one", 1, NOW, NOW + 60)
    store.release("one")
    (after,) = store.take_lines(id_, "one", 1, NOW, NOW + 60)
    assert not store.finish_line(before, "one", LineState.DONE, b'"old"', NOW)
    assert store.finish_line(after, "one", LineState.FAILED, b'"new"', NOW)
    assert store.batch("models/alice", id_).failed == 1


def test_a_lease_that_is_renewed_is_not_lost(store):
    id_ = running(store, 1)
    store.take_lines(id_, "one", 1, NOW, NOW + 60)
    store.renew("one", NOW + 120, {id_: [(1, 1)]}, "")
    assert store.free_lost_lines("two", NOW + 100, {}) == 0


def test_a_lease_of_a_line_is_renewed_by_the_process_that_has_it_alone(store):
    """A pod came back with its name while the process before it still runs, and one process took a line
    twice.
    """
    id_ = running(store, 1)
    store.take_lines(id_, "one/a", 1, NOW, NOW + 60)
    store.renew("one/b", NOW + 120, {id_: [(1, 1)]}, "")
    assert store.free_lost_lines("one/b", NOW + 61, {id_: [(1, 1)]}) == 1
    (again,) = store.take_lines(id_, "one/a", 1, NOW + 61, NOW + 121)
    assert again.take == 2
    store.renew("one/a", NOW + 180, {id_: [(1, 1)]}, "")
    assert store.free_lost_lines("one/a", NOW + 122, {id_: [(1, 1)]}) == 1


def test_a_lease_of_a_batch_is_renewed_by_the_process_that_prepares_it_alone(store):
    """And not by one of the same name, or by one whose connection broke in the commit by which it took it."""
    made = batch()
    store.add(made, 10)

    def taken(worker, now):
        return store.take_batch([Status.VALIDATING], worker, now, now + 60)

    assert taken("one/a", NOW) == made
    store.renew("one/a", NOW + 120, {}, made.id)
    assert taken("two/a", NOW + 119) is None, "it was renewed"
    store.renew("one/b", NOW + 240, {}, made.id)
    for prepared in ("", "batch_other"):
        store.renew("one/a", NOW + 240, {}, prepared)
    assert taken("two/a", NOW + 121) == made
    assert store.add_lines(made, "one/a", some_lines(1)) is None, "who has lost it writes nothing"
    assert not store.accept(made, "one/a", 0, NOW + 122)
    assert not store.refuse(made, "one/a", [], NOW + 122)
    store.put_off(made, "one/a", NOW + 900)
    assert store.batch("models/alice", made.id).status is Status.VALIDATING
    assert store.accept(made, "two/a", 0, NOW + 122)


def test_a_process_gives_up_what_those_of_its_name_had_and_nothing_of_others(store):
    id_ = running(store, 3)
    made = batch()
    store.add(made, 10)
    for worker in ("one/a", "one-2/a", "one/b"):
        store.take_lines(id_, worker, 1, NOW, NOW + 60)
    assert store.take_batch([Status.VALIDATING], "one/a", NOW, NOW + 60) == made
    assert store.release_earlier("one/b") == 1
    (again,) = store.take_lines(id_, "one/b", 9, NOW, NOW + 60)
    assert (again.take, again.losses) == (2, 1)
    assert store.take_batch([Status.VALIDATING], "one/b", NOW, NOW + 60) == made


def test_a_line_that_a_worker_took_and_does_not_know_of_waits_again(store):
    """The connection broke in the commit: the line is this worker's, and no one asks for it."""
    id_ = running(store, 2)
    store.take_lines(id_, "one", 2, NOW, NOW + 60)
    store.renew("one", NOW + 120, {id_: [(1, 1)]}, "")
    assert store.free_lost_lines("one", NOW + 100, {id_: [(1, 1)]}) == 1
    (again,) = store.take_lines(id_, "one", 2, NOW + 100, NOW + 160)
    assert (again.number, again.losses) == (2, 1)


def test_losses_are_counted_of_workers_that_die_and_not_of_those_that_end(store):
    id_ = running(store, 1)
    ends = (store.release, "one/a"), (store.release_earlier, "one/b"), (store.release_earlier, "one/c")
    for losses, (end, worker) in enumerate(ends):
        store.take_lines(id_, "one/a", 1, NOW, NOW + 60)
        end(worker)
        (work,) = store.take_lines(id_, "one/a", 1, NOW, NOW + 60)
        assert work.losses == losses
        store.put_back(work, "one/a", 0.0, 0)


def test_a_batch_that_cannot_be_prepared_now_keeps_no_other_one_waiting(store):
    first, second = batch(), batch(created_at=int(NOW) + 1)
    for one in (first, second):
        store.add(one, 10)
    assert store.take_batch([Status.VALIDATING], "one", NOW, NOW + 60).id == first.id
    store.put_off(first, "one", NOW + 30)
    assert store.take_batch([Status.VALIDATING], "one", NOW + 31, NOW + 91).id == second.id
    assert store.take_batch([Status.VALIDATING], "one", NOW + 31, NOW + 91).id == first.id


def test_what_waits_for_a_time_is_not_taken_before(store):
    id_ = running(store, 1)
    (work,) = store.take_lines(id_, "one", 1, NOW, NOW + 60)
    store.put_back(work, "one", NOW + 10, 1)
    assert store.take_lines(id_, "one", 1, NOW + 9, NOW + 60) == []
    (again,) = store.take_lines(id_, "one", 1, NOW + 10, NOW + 60)
    assert again.failures == 1


def test_a_custom_id_is_once_in_a_batch_whatever_the_file_says(store):
    made = batch()
    store.add(made, 10)
    store.take_batch([Status.VALIDATING], "one", NOW, NOW + 60)
    twice = (Line(n, "same", b"{}", b"") for n in (1, 2))
    with pytest.raises(sa.exc.IntegrityError):
        store.add_lines(made, "one", twice)
    assert store.batch("models/alice", made.id).status is Status.VALIDATING, "it is as it was"


def validating(store, **more):
    """A batch that is being validated."""
    made = batch(**more)
    store.add(made, 10)
    assert store.take_batch([Status.VALIDATING], "one", NOW, NOW + 60) == made
    return made


def some_lines(number):
    return (Line(n, f"line-{n}", b"{}", b"") for n in range(1, number + 1))


def lines_left(store, id_):
    return len(list(store.results(id_, tuple(LineState))))


def test_while_a_file_is_read_others_write_and_it_cannot_be_deleted(store):
    """A file of 200 MiB takes long; SQLite has one lock for all that is written."""
    store.add_file(a_file(), 10)
    made = validating(store, input_file_id="file-1")

    def found():
        for one in some_lines(1100):
            if one.number in (1, 700):
                store.add_file(a_file(id=f"file-{one.number + 1}", owner="b"), 10)
                with pytest.raises(BusyFileError):
                    store.delete_file("models/alice", "file-1")
            yield one

    total = store.add_lines(made, "one", found())
    assert total == 1100
    assert store.take_lines(made.id, "one", 1, NOW, NOW + 60) == [], "none is asked for before it is whole"
    assert store.accept(made, "one", total, NOW)
    assert store.delete_file("models/alice", "file-1")
    assert len(store.take_lines(made.id, "one", 2000, NOW, NOW + 60)) == 1100


@pytest.mark.parametrize("end", ["cancel", "expire"])
def test_a_batch_that_ends_while_its_file_is_read_has_no_lines(store, end):
    made = validating(store)

    def found():
        for one in some_lines(1100):
            if one.number == 700:
                assert lines_left(store, made.id) == 500
                store.cancel("models/alice", made.id, NOW) if end == "cancel" else store.expire(NOW + 100)
            yield one

    assert store.add_lines(made, "one", found()) is None
    assert not store.accept(made, "one", 1100, NOW)
    over = finalized(store)
    assert lines_left(store, made.id) == 0
    assert (over.total, over.completed, over.failed) == (0, 0, 0)


def test_lines_of_a_validation_that_broke_off_are_not_there_twice_or_after_a_refusal(store):
    made = validating(store)

    def broken():
        yield from some_lines(700)
        raise OSError("the file cannot be read any more")

    for _ in range(2):
        with pytest.raises(OSError, match="cannot be read"):
            store.add_lines(made, "one", broken())
        assert lines_left(store, made.id) == 500
    assert store.add_lines(made, "one", some_lines(600)) == 600
    assert lines_left(store, made.id) == 600
    assert store.refuse(made, "one", [{"code": "invalid_json_line"}], NOW)
    assert lines_left(store, made.id) == 0
    assert store.batch("models/alice", made.id).status is Status.FAILED


def test_a_batch_of_a_file_that_is_not_the_client_s_is_none(store):
    store.add_file(a_file(), 10)
    for owner, id_ in (("models/bob", "file-1"), ("models/alice", "file-2")):
        with pytest.raises(MissingFileError):
            store.add(batch(owner=owner, input_file_id=id_), 10)
    assert store.counts() == ({}, None)


def test_results_and_lines_of_any_size_are_in_memory_by_a_few_megabytes(store):
    """A batch may have 50,000 answers of 8 MiB."""
    made, size = batch(), 1 << 20
    store.add(made, 10)
    store.take_batch([Status.VALIDATING], "one", NOW, NOW + 60)
    most, alive = 0, weakref.WeakSet()

    def found():
        nonlocal most
        for number in range(40):
            alive.add(one := Body(number))
            most = max(most, len(alive))
            yield one

    tracemalloc.start()
    try:
        assert store.accept(made, "one", store.add_lines(made, "one", found()), NOW)
        assert most < 12, "of lines"
        for work in store.take_lines(made.id, "one", 3, NOW, NOW + 60):
            store.finish_line(work, "one", LineState.DONE, b"x" * size, NOW)
        while some := store.take_lines(made.id, "one", 1, NOW, NOW + 60):
            store.finish_line(some[0], "one", LineState.DONE, b"x" * size, NOW)
        tracemalloc.reset_peak()
        assert [one.number for one in store.results(made.id, (LineState.DONE,))] == list(range(40))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 * size, "of 40 results"


def test_results_are_all_there_beyond_one_page(store):
    id_ = running(store, 1203)
    found = [one.number for one in store.results(id_, (LineState.WAITING,))]
    assert found == list(range(1, 1204))


def finalized(store, worker="one", **written):
    """The batch that has ended, as another call shows it once it is over."""
    ended = store.take_batch([Status.CANCELLING, Status.FINALIZING], worker, NOW, NOW + 60)
    assert not written or store.add_results(ended, worker, written)
    assert store.finalize(ended, worker, NOW)
    return store.batch(ended.owner, ended.id)


class Transactions:
    """How many rows each of them has changed. ``fail_at``: the number of the one that breaks off."""

    def __init__(self, engine, fail_at=0):
        self.rows, self._fail_at = [], fail_at
        sa.event.listen(engine, "begin", lambda connection: self.rows.append(0))
        sa.event.listen(engine, "after_cursor_execute", self._count)
        sa.event.listen(engine, "commit", self._fail)

    def _count(self, connection, cursor, statement, parameters, context, many):
        if statement.startswith(("UPDATE", "DELETE", "INSERT")):
            self.rows[-1] += cursor.rowcount

    def _fail(self, connection):
        if len(self.rows) == self._fail_at:
            raise OSError("the process dies")


@pytest.mark.parametrize(("end", "status"), [("cancel", Status.CANCELLED), ("expire", Status.EXPIRED)])
def test_the_end_of_a_long_batch_keeps_no_other_write_waiting(store, end, status):
    """SQLite has one lock for all that is written: a batch may have 50,000 lines."""
    id_ = running(store, 1203)
    (work, *_) = store.take_lines(id_, "one", 2, NOW, NOW + 60)
    transactions = Transactions(store._writing)
    store.cancel("models/alice", id_, NOW) if end == "cancel" else store.expire(NOW + 100)
    assert store.take_lines(id_, "two", 1, NOW, NOW + 60) == [], "nothing more is asked for"
    assert not store.finish_line(work, "one", LineState.DONE, b"{}", NOW), "and no answer counts"
    over = finalized(store, error_file_id=a_file())
    assert (over.status, over.error_file_id, over.completed) == (status, "file-1", 0)
    assert over.failed == (0 if end == "cancel" else 1203)
    assert lines_left(store, id_) == 0
    assert max(transactions.rows) <= 500 < 1203 < sum(transactions.rows)


def test_a_worker_that_dies_while_it_deletes_lines_leaves_the_rest_to_the_next_one(store):
    id_ = running(store, 1203)
    store.cancel("models/alice", id_, NOW)
    Transactions(store._writing, fail_at=4)  # it takes the batch, notes its file, deletes 500 lines and 500
    with pytest.raises(OSError, match="dies"):
        finalized(store, "one/a", error_file_id=a_file())
    assert store.batch("models/alice", id_).status is Status.CANCELLING
    assert lines_left(store, id_) == 703
    store.release_earlier("one/b")
    over = finalized(store, "one/b")
    assert (over.status, over.error_file_id) == (Status.CANCELLED, "file-1")
    assert lines_left(store, id_) == 0


def test_a_worker_that_has_lost_a_batch_neither_notes_its_files_nor_ends_it(store):
    made = running(store, 3)
    store.cancel("models/alice", made, NOW)
    lost = store.take_batch([Status.CANCELLING], "one", NOW, NOW + 60)
    store.take_batch([Status.CANCELLING], "two", NOW + 61, NOW + 120)
    assert not store.add_results(lost, "one", {"error_file_id": a_file()})
    assert not store.finalize(lost, "one", NOW)
    assert lines_left(store, made) == 3 and store.file("models/alice", "file-1") is None


@pytest.mark.parametrize(("end", "state"), [("cancel", LineState.CANCELLED), ("expire", LineState.EXPIRED)])
def test_the_line_of_a_job_says_at_once_how_it_has_ended(store, end, state):
    job = batch(is_job=True, status=Status.IN_PROGRESS, total=1)
    store.add(job, 10, Line(1, "job", b"{}", b""))
    is_cancel = end == "cancel"
    store.cancel("models/alice", job.id, NOW, is_job=True) if is_cancel else store.expire(NOW + 100)
    assert store.result(job.id).state is state


def test_quotas_hold_for_requests_at_the_same_time(store):
    most, outcomes = 5, []

    def add(number):
        file = File(
            id=f"file-{number}", owner="a", filename="f", purpose="batch", bytes=10, created_at=int(NOW)
        )
        try:
            store.add_file(file, 10 * most)
            outcomes.append(True)
        except QuotaError:
            outcomes.append(False)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 7 + [True] * most


def test_old_batches_and_files_are_forgotten_and_what_is_open_stays(store):
    id_ = running(store)
    store.add_file(a_file(), 10)
    assert store.forget(NOW) == []
    assert store.forget(NOW + 1) == ["file-1"]
    assert store.batch("models/alice", id_) is not None
    store.cancel("models/alice", id_, NOW)
    store.take_batch([Status.CANCELLING], "one", NOW, NOW + 60)
    assert store.finalize(store.batch("models/alice", id_), "one", NOW)
    store.forget(NOW + 1)
    assert store.batch("models/alice", id_) is None


def test_sqlite_is_durable_and_does_not_wait_for_readers(tmp_path):
    engine = prepared(f"sqlite:///{tmp_path / 'batches.sqlite'}")
    with engine.connect() as connection:
        journal = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
        synchronous = connection.exec_driver_sql("PRAGMA synchronous").scalar()
    engine.dispose()
    assert (journal, synchronous) == ("wal", 2), "2 is FULL: what is stored survives a loss of power"


def test_what_is_done_every_few_seconds_reads_no_table_as_a_whole(tmp_path):
    """With 50,000 lines that would be under the lock that every write waits for."""
    engine = prepared(f"sqlite:///{tmp_path / 'batches.sqlite'}")
    store, statements = Store(engine), []

    def note(connection, cursor, statement, parameters, context, many):
        if not statement.startswith("EXPLAIN"):
            statements.append((statement, parameters))

    sa.event.listen(engine, "before_cursor_execute", note)
    store.renew("one", NOW, {"batch_1": [(1, 1), (2, 1)]}, "batch_1")
    store.release("one")
    store.free_lost_lines("one", NOW, {})
    store.expire(NOW)
    store.take_webhook(NOW, NOW)
    store.forget(NOW)
    store.take_batch([Status.VALIDATING], "one", NOW, NOW)
    with engine.connect() as connection:
        plans = {
            statement: connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
            for statement, parameters in statements
            if not statement.startswith("BEGIN")
        }
    engine.dispose()
    assert len(plans) >= 9
    steps = [(row[3], statement) for statement, plan in plans.items() for row in plan]
    whole = tuple(f"SCAN {name}" for name in ("files", "batches", "lines"))
    assert not [step for step in steps if step[0].startswith(whole) and "INDEX" not in step[0]]
