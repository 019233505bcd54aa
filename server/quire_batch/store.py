"""All that is known of files, batches and lines, in SQLite or PostgreSQL, changed in short transactions.

A line has one row, and its result goes there in the transaction that counts it: so it is done once, whatever
dies when. A worker takes lines for the time of a lease and renews it; what it has taken when it dies is taken
again by another one, and what it writes after it has lost a line is dropped. A worker is one process: the
next one of the same name has none of its leases. A batch ends by its status, in one row: lines that are left
then are no one's any more, and are deleted a few at a time once the batch's files say what became of them.
Several workers share PostgreSQL by `SELECT ... FOR UPDATE SKIP LOCKED`; SQLite has one. Times are passed in.
Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine, RowMapping

from quire_batch.lines import Line
from quire_batch.records import (
    OPEN,
    UNANSWERED,
    Batch,
    File,
    LineState,
    Result,
    Running,
    Status,
    Work,
    name_of,
)
from quire_batch.tables import WRITES, batches, files, lines

_ROWS_AT_ONCE = 500
_BYTES_AT_ONCE = 4 << 20  # of bodies or results in memory, one that is longer by itself
_Item = TypeVar("_Item")
_ENDED = {LineState.DONE: "completed", LineState.FAILED: "failed"}
_ENDING = (Status.FINALIZING, Status.CANCELLING)


#: Lines in flight, by the batch: their numbers, each with the take that this worker's lease is of.
Held = Mapping[str, Collection[tuple[int, int]]]

#: What passes when the database is back, or has space again.
STORE_ERRORS = (
    sa.exc.OperationalError,
    sa.exc.InterfaceError,
    sa.exc.InternalError,  # a database that is read-only after a failover
    sa.exc.TimeoutError,
)


class QuotaError(Exception):
    """The client has as much as it may have."""


class BusyFileError(Exception):
    """A batch that runs needs the file."""


class MissingFileError(Exception):
    """The client has no such file."""


class Store:
    """The database."""

    def __init__(self, engine: Engine) -> None:
        self._reading = engine
        self._writing = engine.execution_options(**{WRITES: True})

    def _read(self) -> AbstractContextManager[Connection]:
        return self._reading.begin()

    def _write(self) -> AbstractContextManager[Connection]:
        return self._writing.begin()

    # ------------------------------------------------------------------ files

    def add_file(self, file: File, most_bytes: int) -> None:
        """Raises QuotaError where the client would have more bytes than that."""
        with self._write() as connection:
            _lock_owner(connection, file.owner)
            _check_bytes(connection, file.owner, file.bytes, most_bytes)
            connection.execute(files.insert().values(_of_file(file)))

    def check_bytes(self, owner: str, more: int, most_bytes: int) -> None:
        """Raises QuotaError where the client would have more bytes than that."""
        with self._read() as connection:
            _check_bytes(connection, owner, more, most_bytes)

    def file(self, owner: str, id_: str) -> File | None:
        """A client's file."""
        with self._read() as connection:
            return _file_of(connection, owner, id_)

    def files(self, owner: str, purpose: str, after: str, limit: int, *, is_ascending: bool) -> list[File]:
        """A client's files, from the newest on, or from the oldest; those behind the one ``after``."""
        query = files.select().where(files.c.owner == owner)
        if purpose:
            query = query.where(files.c.purpose == purpose)
        with self._read() as connection:
            query = _page(connection, query, files, owner, after, limit, is_ascending=is_ascending)
            return [_file(row) for row in connection.execute(query).mappings()]

    def delete_file(self, owner: str, id_: str) -> bool:
        """Whether it was there. Raises BusyFileError."""
        with self._write() as connection:
            _lock_owner(connection, owner)
            needed = sa.select(batches.c.id).where(
                batches.c.input_file_id == id_, batches.c.status == Status.VALIDATING
            )
            if connection.scalar(needed) is not None:
                raise BusyFileError(f"{id_} is the input of a batch that is being validated")
            mine = sa.delete(files).where(files.c.id == id_, files.c.owner == owner)
            return bool(connection.execute(mine).rowcount)

    # ------------------------------------------------------------------ batches and jobs

    def add(self, batch: Batch, most: int, line: Line | None = None) -> None:
        """A new batch, or a job with its line. Raises QuotaError where the client has so many open, and
        MissingFileError.
        """
        with self._write() as connection:
            _lock_owner(connection, batch.owner)
            if (id_ := batch.input_file_id) and _file_of(connection, batch.owner, id_) is None:
                raise MissingFileError(f"there is no file {id_}")
            is_open = sa.and_(
                batches.c.owner == batch.owner,
                batches.c.is_job == batch.is_job,
                batches.c.status.in_(OPEN),
            )
            if int(connection.scalar(sa.select(sa.func.count()).where(is_open)) or 0) >= most:
                kind = "jobs" if batch.is_job else "batches"
                raise QuotaError(f"this client may have {most} {kind} that are not over: wait for one to end")
            connection.execute(batches.insert().values(_of_batch(batch)))
            if line is not None:
                connection.execute(lines.insert(), [_of_line(batch.id, line)])

    def batch(self, owner: str, id_: str, *, is_job: bool = False) -> Batch | None:
        """A client's batch, or job."""
        query = batches.select().where(
            batches.c.id == id_, batches.c.owner == owner, batches.c.is_job == is_job
        )
        with self._read() as connection:
            return next((_batch(row) for row in connection.execute(query).mappings()), None)

    def batches(self, owner: str, after: str, limit: int) -> list[Batch]:
        """A client's batches, from the newest on; those behind the one ``after``."""
        query = batches.select().where(batches.c.owner == owner, batches.c.is_job.is_(False))
        with self._read() as connection:
            query = _page(connection, query, batches, owner, after, limit, is_ascending=False)
            return [_batch(row) for row in connection.execute(query).mappings()]

    def cancel(self, owner: str, id_: str, now: float, *, is_job: bool = False) -> Batch | None:
        """Nothing more is asked for, and no answer that is still to come counts. None: there is none."""
        with self._write() as connection:
            query = batches.select().where(
                batches.c.id == id_, batches.c.owner == owner, batches.c.is_job == is_job
            )
            row = connection.execute(query.with_for_update()).mappings().first()
            if row is not None and row["status"] in (Status.VALIDATING, Status.IN_PROGRESS):
                _end(connection, row, Status.CANCELLING, Status.CANCELLED, now)
                row = connection.execute(query).mappings().one()
            return None if row is None else _batch(row)

    def result(self, id_: str) -> Result | None:
        """The line of a job."""
        return next(self.results(id_, tuple(LineState)), None)

    # ------------------------------------------------------------------ the work

    def take_batch(
        self, statuses: Sequence[Status], worker: str, now: float, lease_until: float
    ) -> Batch | None:
        """A batch in one of these statuses, for this worker alone until then."""
        query = (
            batches.select()
            .where(batches.c.status.in_(statuses), batches.c.lease_until < now)
            .order_by(batches.c.lease_until, batches.c.created_at)  # those that failed come last
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        with self._write() as connection:
            row = connection.execute(query).mappings().first()
            if row is None:
                return None
            taken = sa.update(batches).where(batches.c.id == row["id"])
            connection.execute(taken.values(worker=worker, lease_until=lease_until))
            return _batch(row)

    def put_off(self, batch: Batch, worker: str, until: float) -> None:
        """A batch cannot be prepared now: no one takes it until then."""
        mine = sa.update(batches).where(batches.c.id == batch.id, batches.c.worker == worker)
        with self._write() as connection:
            connection.execute(mine.values(worker="", lease_until=until))

    def add_lines(self, batch: Batch, worker: str, found: Iterator[Line]) -> int | None:
        """Write a batch's lines, in short transactions: none of them is asked for before `accept`. How many
        there are; None where the batch is no more this worker's, or was cancelled. Raises what ``found``
        raises, and then those that are there are for `refuse`, or for the next `add_lines`.
        """
        if not self._drop_lines(batch.id, worker, Status.VALIDATING):
            return None
        total = 0
        for some in _bounded(found, lambda line: len(line.body)):
            with self._write() as connection:
                if _mine(connection, batch.id, worker, Status.VALIDATING) is None:
                    return None
                connection.execute(lines.insert(), [_of_line(batch.id, line) for line in some])
            total += len(some)
        return total

    def accept(self, batch: Batch, worker: str, total: int, now: float) -> bool:
        """A batch has all of its lines, so many, and they may be asked for. False where it is no more this
        worker's, or was cancelled.
        """
        with self._write() as connection:
            row = _mine(connection, batch.id, worker, Status.VALIDATING)
            if row is not None:
                _set(connection, row, now, status=Status.IN_PROGRESS, total=total, lease_until=0.0)
            return row is not None

    def refuse(self, batch: Batch, worker: str, errors: Sequence[Mapping[str, Any]], now: float) -> bool:
        """A batch's file is no list of requests. False as for `accept`."""
        if not self._drop_lines(batch.id, worker, Status.VALIDATING):
            return False
        with self._write() as connection:
            row = _mine(connection, batch.id, worker, Status.VALIDATING)
            if row is not None:
                details = orjson.dumps({**batch.details, "errors": errors}).decode()
                _set(connection, row, now, status=Status.FAILED, details=details, delegation="")
            return row is not None

    def _drop_lines(self, batch_id: str, worker: str, *statuses: Status) -> bool:
        """Delete the lines of a batch, in short transactions. False where it is no more this worker's, or in
        none of these statuses.
        """
        size = sa.func.length(lines.c.body) + sa.func.length(lines.c.result)
        query = sa.select(lines.c.number, size).where(lines.c.batch_id == batch_id)
        query = query.order_by(lines.c.number).limit(_ROWS_AT_ONCE)
        while True:
            with self._write() as connection:
                if _mine(connection, batch_id, worker, *statuses) is None:
                    return False
                some = next(_bounded(connection.execute(query).all(), lambda row: int(row[1])), None)
                if some is None:
                    return True
                chosen = lines.c.number.in_([row[0] for row in some])
                connection.execute(sa.delete(lines).where(lines.c.batch_id == batch_id, chosen))

    def running(self) -> list[Running]:
        """The batches and jobs whose lines may be asked for, from the oldest on."""
        columns = (batches.c.id, batches.c.owner, batches.c.is_job)
        query = sa.select(*columns).where(batches.c.status == Status.IN_PROGRESS)
        with self._read() as connection:
            found = connection.execute(query.order_by(batches.c.created_at, batches.c.id)).all()
        return [Running(*row) for row in found]

    def take_lines(
        self, batch_id: str, worker: str, number: int, now: float, lease_until: float
    ) -> list[Work]:
        """Up to so many lines that wait, neighbours by their prefix."""
        is_free = sa.and_(
            lines.c.batch_id == batch_id, lines.c.state == LineState.WAITING, lines.c.not_before <= now
        )
        chosen = lines.select().where(is_free).order_by(lines.c.prefix, lines.c.number).limit(number)
        with self._write() as connection:
            query = batches.select().where(batches.c.id == batch_id).with_for_update(read=True)
            row = connection.execute(query).mappings().first()
            if row is None or row["status"] != Status.IN_PROGRESS:
                return []
            found = list(connection.execute(chosen.with_for_update(skip_locked=True)).mappings())
            if found:
                numbers = [one["number"] for one in found]
                taken = sa.update(lines).where(lines.c.batch_id == batch_id, lines.c.number.in_(numbers))
                values = {"state": LineState.RUNNING, "worker": worker, "lease_until": lease_until}
                connection.execute(taken.values(**values, take=lines.c.take + 1))
            return [_work(one, row) for one in found]

    def finish_line(self, work: Work, worker: str, state: LineState, result: bytes, now: float) -> bool:
        """A line is done, or has failed; its batch ends with the last one. False where it is no more this
        worker's, or its batch has ended before.
        """
        with self._write() as connection:
            query = batches.select().where(batches.c.id == work.batch_id).with_for_update()
            row = connection.execute(query).mappings().first()
            values = {"state": state, "result": result, "worker": "", "body": b""}
            if row is None or row["status"] != Status.IN_PROGRESS:
                return False
            if not connection.execute(_held(work, worker).values(values)).rowcount:
                return False
            counts = {_ENDED[state]: row[_ENDED[state]] + 1}
            _set(connection, row, now, **counts)
            if row["completed"] + row["failed"] + 1 == row["total"]:
                row = connection.execute(query).mappings().one()
                _end(connection, row, Status.FINALIZING, Status.COMPLETED, now)
            return True

    def put_back(self, work: Work, worker: str, not_before: float, failures: int) -> None:
        """A line waits again."""
        values = {"state": LineState.WAITING, "worker": "", "not_before": not_before, "failures": failures}
        with self._write() as connection:
            connection.execute(_held(work, worker).values(values))

    def renew(self, worker: str, lease_until: float, held: Held, prepared: str) -> None:
        """This worker goes on with these lines, and with the batch of this id, which it prepares, if any.
        What it has taken and has not learned of is not renewed.
        """
        for batch_id, leases in held.items():
            of_takes = sa.tuple_(lines.c.number, lines.c.take).in_(leases)
            running = _running(batch_id, [number for number, _ in leases])
            mine = sa.update(lines).where(running, of_takes, lines.c.worker == worker)
            with self._write() as connection:
                connection.execute(mine.values(lease_until=lease_until))
        if prepared:
            mine = sa.update(batches).where(
                batches.c.id == prepared, batches.c.worker == worker, batches.c.lease_until > 0
            )
            with self._write() as connection:  # by itself: others lock a batch before its lines
                connection.execute(mine.values(lease_until=lease_until))

    def release(self, worker: str) -> None:
        """This worker ends, and has nothing any more."""
        self._free(lines.c.worker == worker, batches.c.worker == worker, losses=0)

    def release_earlier(self, worker: str) -> int:
        """What processes of the same name had when they died waits again. How many lines there were."""
        name = name_of(worker)
        of_lines, of_batches = (
            sa.and_(sa.func.substr(each.c.worker, 1, len(name)) == name, each.c.worker != worker)
            for each in (lines, batches)
        )
        return self._free(of_lines, of_batches, losses=1)

    def _free(self, of_lines: sa.ColumnElement[bool], of_batches: sa.ColumnElement[bool], losses: int) -> int:
        """Give up leases; how many of lines."""
        with self._write() as connection:
            lost = sa.update(lines).where(lines.c.state == LineState.RUNNING, of_lines)
            free = {"state": LineState.WAITING, "worker": "", "losses": lines.c.losses + losses}
            number = connection.execute(lost.values(free)).rowcount
        with self._write() as connection:
            connection.execute(sa.update(batches).where(of_batches).values(worker="", lease_until=0.0))
        return number

    def free_lost_lines(self, worker: str, now: float, held: Held) -> int:
        """Lines that are renewed no more wait again: those of other workers, and of this one those that it
        does not have, since it has not learned that it has taken them. How many there were.
        """
        lost = sa.and_(lines.c.state == LineState.RUNNING, lines.c.lease_until < now)
        columns = (lines.c.batch_id, lines.c.number, lines.c.take, lines.c.worker)
        query = sa.select(*columns).where(lost).limit(_ROWS_AT_ONCE)
        with self._write() as connection:
            found: dict[str, list[int]] = {}
            for batch_id, number, take, by in connection.execute(query.with_for_update(skip_locked=True)):
                if by != worker or (number, take) not in held.get(batch_id, ()):
                    found.setdefault(batch_id, []).append(number)
            free = {"state": LineState.WAITING, "worker": "", "losses": lines.c.losses + 1}
            for batch_id, numbers in found.items():
                connection.execute(sa.update(lines).where(_running(batch_id, numbers)).values(free))
            return sum(map(len, found.values()))

    def expire(self, now: float) -> None:
        """Batches whose time is over end with what is done, so many of them at once."""
        is_late = sa.and_(
            batches.c.status.in_((Status.VALIDATING, Status.IN_PROGRESS)), batches.c.expires_at <= now
        )
        query = batches.select().where(is_late).limit(_ROWS_AT_ONCE)
        with self._write() as connection:
            for row in connection.execute(query.with_for_update(skip_locked=True)).mappings().all():
                _end(connection, row, Status.FINALIZING, Status.EXPIRED, now)

    def results(self, batch_id: str, states: Sequence[LineState]) -> Iterator[Result]:
        """The lines in these states, in the order of the file."""
        chosen = sa.and_(lines.c.batch_id == batch_id, lines.c.state.in_(states))
        sizes = sa.select(lines.c.number, sa.func.length(lines.c.result)).where(chosen)
        columns = (lines.c.number, lines.c.custom_id, lines.c.state, lines.c.result)
        last = -1
        while True:
            query = sizes.where(lines.c.number > last).order_by(lines.c.number).limit(_ROWS_AT_ONCE)
            with self._read() as connection:
                found = connection.execute(query).all()
            for some in _bounded(found, lambda row: int(row[1])):
                last = some[-1][0]
                run = chosen & lines.c.number.between(some[0][0], last)
                with self._read() as connection:
                    rows = connection.execute(sa.select(*columns).where(run).order_by(lines.c.number)).all()
                yield from (Result(row[0], row[1], LineState(row[2]), bytes(row[3])) for row in rows)
            if len(found) < _ROWS_AT_ONCE:
                return

    def add_results(self, batch: Batch, worker: str, written: Mapping[str, File]) -> bool:
        """What came of a batch's lines is in these files, by the column that names them: the lines are not
        needed any more. False where it is no more this worker's.
        """
        with self._write() as connection:
            row = _mine(connection, batch.id, worker, *_ENDING)
            if row is None:
                return False
            for file in written.values():
                connection.execute(files.insert().values(_of_file(file)))
            columns = {column: file.id for column, file in written.items()}
            connection.execute(sa.update(batches).where(batches.c.id == batch.id).values(columns))
            return True

    def finalize(self, batch: Batch, worker: str, now: float) -> bool:
        """Delete a batch's lines, then it is over; of a job the line stays. False where it is no more this
        worker's: the next one goes on with the lines that are left.
        """
        if not batch.is_job and not self._drop_lines(batch.id, worker, *_ENDING):
            return False
        with self._write() as connection:
            row = _mine(connection, batch.id, worker, *_ENDING)
            if row is not None:
                webhook_at = now if batch.webhook else None
                values = {"status": row["ends_as"], "delegation": "", "webhook_at": webhook_at}
                _set(connection, row, now, **values)
            return row is not None

    # ------------------------------------------------------------------ webhooks, age, and what is counted

    def take_webhook(self, now: float, again_at: float) -> tuple[Batch, int] | None:
        """A job whose end is to be reported now, and how often that has failed; it is due again then."""
        query = batches.select().where(batches.c.webhook_at <= now).order_by(batches.c.webhook_at).limit(1)
        with self._write() as connection:
            row = connection.execute(query.with_for_update(skip_locked=True)).mappings().first()
            if row is None:
                return None
            due = sa.update(batches).where(batches.c.id == row["id"]).values(webhook_at=again_at)
            connection.execute(due)
            return _batch(row), int(row["webhook_failures"])

    def webhook_tried(self, id_: str, failures: int, again_at: float | None) -> None:
        """It was reported, or given up (None), or is to be tried again."""
        values = {"webhook_at": again_at, "webhook_failures": failures}
        with self._write() as connection:
            connection.execute(sa.update(batches).where(batches.c.id == id_).values(values))

    def forget(self, before: float) -> list[str]:
        """Delete what ended, and files that were made, before that. The ids of the files."""
        over = sa.and_(batches.c.created_at < before, batches.c.status.not_in(OPEN))
        with self._write() as connection:
            old = list(connection.scalars(sa.select(batches.c.id).where(over).limit(_ROWS_AT_ONCE)))
            connection.execute(sa.delete(lines).where(lines.c.batch_id.in_(old)))
            connection.execute(sa.delete(batches).where(batches.c.id.in_(old)))
            needed = sa.select(batches.c.input_file_id).where(batches.c.status.in_(OPEN))
            stale = sa.and_(files.c.created_at < before, files.c.id.not_in(needed))
            ids = list(connection.scalars(sa.select(files.c.id).where(stale).limit(_ROWS_AT_ONCE)))
            connection.execute(sa.delete(files).where(files.c.id.in_(ids)))
            return ids

    def counts(self) -> tuple[dict[str, int], float | None]:
        """Batches and jobs by their status, of those that are not over, and when the oldest was created."""
        is_open = batches.c.status.in_(OPEN)
        by_status = sa.select(batches.c.status, sa.func.count()).where(is_open).group_by(batches.c.status)
        with self._read() as connection:
            oldest = connection.scalar(sa.select(sa.func.min(batches.c.created_at)).where(is_open))
            return {row[0]: row[1] for row in connection.execute(by_status)}, oldest

    def ping(self) -> None:
        """Raises what a database that is away raises."""
        with self._read() as connection:
            connection.execute(sa.select(1))


def _bounded(items: Iterable[_Item], size: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """In runs of so many rows and bytes as may be in memory at once."""
    some: list[_Item] = []
    total = 0
    for one in items:
        if some and (len(some) == _ROWS_AT_ONCE or total + size(one) > _BYTES_AT_ONCE):
            yield some
            some, total = [], 0
        some.append(one)
        total += size(one)
    if some:
        yield some


def _lock_owner(connection: Connection, owner: str) -> None:
    """Quotas of one client are checked one after the other. In SQLite all that writes is."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtext(owner))))


def _check_bytes(connection: Connection, owner: str, more: int, most_bytes: int) -> None:
    used = sa.select(sa.func.coalesce(sa.func.sum(files.c.bytes), 0)).where(files.c.owner == owner)
    if int(connection.scalar(used) or 0) + more > most_bytes:
        raise QuotaError(f"this client's files may have {most_bytes} bytes together: delete some")


def _file_of(connection: Connection, owner: str, id_: str) -> File | None:
    query = files.select().where(files.c.id == id_, files.c.owner == owner)
    return next((_file(row) for row in connection.execute(query).mappings()), None)


def _page(
    connection: Connection,
    query: sa.Select[Any],
    table: sa.Table,
    owner: str,
    after: str,
    limit: int,
    *,
    is_ascending: bool,
) -> sa.Select[Any]:
    key = sa.tuple_(table.c.created_at, table.c.id)
    if after:
        mine = sa.select(table.c.created_at).where(table.c.id == after, table.c.owner == owner)
        created_at = connection.scalar(mine)
        last = sa.tuple_(sa.literal(created_at), sa.literal(after))
        query = query.where(sa.false() if created_at is None else key > last if is_ascending else key < last)
    columns = (table.c.created_at, table.c.id)
    return query.order_by(*(column.asc() if is_ascending else column.desc() for column in columns)).limit(
        limit
    )


def _mine(connection: Connection, id_: str, worker: str, *statuses: Status) -> RowMapping | None:
    """The row of a batch that this worker has taken and that is still in one of these statuses."""
    query = batches.select().where(
        batches.c.id == id_, batches.c.worker == worker, batches.c.status.in_(statuses)
    )
    return connection.execute(query.with_for_update()).mappings().first()


def _running(batch_id: str, numbers: Collection[int]) -> sa.ColumnElement[bool]:
    return sa.and_(
        lines.c.batch_id == batch_id, lines.c.number.in_(numbers), lines.c.state == LineState.RUNNING
    )


def _held(work: Work, worker: str) -> sa.Update:
    """An update of a line, if it is still this worker's, as it was taken."""
    return sa.update(lines).where(
        lines.c.batch_id == work.batch_id,
        lines.c.number == work.number,
        lines.c.state == LineState.RUNNING,
        lines.c.worker == worker,
        lines.c.take == work.take,
    )


def _end(connection: Connection, row: RowMapping, status: Status, ends_as: Status, now: float) -> None:
    """Nothing of a batch is asked for any more, and no answer that is still to come counts. Its lines stay as
    they are, for they may be many; that of a job, which is read as long as the job is, says how it ended.
    """
    is_expired = ends_as is Status.EXPIRED
    if row["is_job"]:
        state = LineState.EXPIRED if is_expired else LineState.CANCELLED
        left = lines.c.batch_id == row["id"], lines.c.state.in_(UNANSWERED)
        values = {"state": state, "worker": "", "body": b""}
        connection.execute(sa.update(lines).where(*left).values(values))
    failed = row["total"] - row["completed"] if is_expired else row["failed"]
    _set(connection, row, now, status=status, ends_as=ends_as, failed=failed, worker="", lease_until=0.0)


def _set(connection: Connection, row: RowMapping, now: float, **values: Any) -> None:
    """Change a batch, and note when it came into a new status."""
    if "status" in values:
        times = {**orjson.loads(row["times"]), f"{values['status']}_at": int(now)}
        values["times"] = orjson.dumps(times).decode()
    connection.execute(sa.update(batches).where(batches.c.id == row["id"]).values(**values))


def _of_file(file: File) -> dict[str, Any]:
    return {column.name: getattr(file, column.name) for column in files.columns}


def _file(row: RowMapping) -> File:
    return File(**row)


def _of_batch(batch: Batch) -> dict[str, Any]:
    same = {name: getattr(batch, name) for name in Batch.__dataclass_fields__}
    texts = {name: orjson.dumps(same[name]).decode() for name in ("details", "times")}
    unset = {"ends_as": "", "worker": "", "lease_until": 0.0, "webhook_failures": 0}
    return {**same, **texts, **unset}


def _batch(row: RowMapping) -> Batch:
    values = {name: row[name] for name in Batch.__dataclass_fields__}
    for name in ("details", "times"):
        values[name] = orjson.loads(values[name])
    return Batch(**{**values, "status": Status(row["status"])})


def _of_line(batch_id: str, line: Line) -> dict[str, Any]:
    return {
        "batch_id": batch_id,
        "number": line.number,
        "custom_id": line.custom_id,
        "body": line.body,
        "prefix": line.prefix,
        "state": LineState.WAITING,
        "not_before": 0.0,
        "worker": "",
        "lease_until": 0.0,
        "take": 0,
        "failures": 0,
        "losses": 0,
        "result": b"",
    }


def _work(line: RowMapping, batch: RowMapping) -> Work:
    return Work(
        batch_id=batch["id"],
        number=line["number"],
        endpoint=batch["endpoint"],
        delegation=batch["delegation"],
        body=bytes(line["body"]),
        take=line["take"] + 1,
        failures=line["failures"],
        losses=line["losses"],
    )
