"""A database of any version becomes one of this program's, or is refused and left as it is."""

import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from quire_batch.records import Batch, Status
from quire_batch.schema import STEPS, SchemaError, prepare
from quire_batch.store import Store
from quire_batch.tables import connect, metadata
from tests.batch.launch import Batch as Process

SCHEMAS = Path(__file__).parent / "schemas"
ADD = ("ALTER TABLE batches ADD COLUMN color VARCHAR(16) NOT NULL DEFAULT 'red'",)
INDEX = ("CREATE INDEX batches_by_color ON batches (color)",)
MADE = Batch(
    id="batch_1",
    owner="models/alice",
    endpoint="/v1/completions",
    status=Status.VALIDATING,
    delegation="d",
    created_at=1,
    expires_at=2,
)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """Of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'batches.sqlite'}"
    url = request.getfixturevalue("postgres").url
    name = f"db_{tmp_path.name}".replace("-", "_").lower()
    engine = connect(url)
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(sa.text(f'CREATE DATABASE "{name}"'))
    engine.dispose()
    return url.replace("/postgres?", f"/{name}?")


@pytest.fixture
def engine(url):
    engine = connect(url)
    yield engine
    engine.dispose()


def make_first(engine):
    """The tables of the first version, as a program made them that noted none."""
    text = (SCHEMAS / f"1_{engine.dialect.name}.sql").read_text()
    with engine.begin() as connection:
        for statement in filter(str.strip, text.split(";")):
            connection.exec_driver_sql(statement)


def version(engine):
    with engine.connect() as connection:
        return connection.scalar(sa.text("SELECT version FROM quire_batch_version"))


def described(engine):
    """All that tells one schema from another."""
    inspector = sa.inspect(engine)
    return {
        table: (
            sorted((one["name"], str(one["type"]), one["nullable"]) for one in inspector.get_columns(table)),
            inspector.get_pk_constraint(table)["constrained_columns"],
            sorted(
                (one["name"] or "", tuple(one["column_names"]), bool(one["unique"]))
                for one in inspector.get_indexes(table)
            ),
            sorted(tuple(one["column_names"]) for one in inspector.get_unique_constraints(table)),
        )
        for table in metadata.tables
    }


def test_the_first_version_with_all_steps_has_the_tables_of_a_new_database(engine, tmp_path):
    """Who changes a table without a step breaks every database that there is."""
    make_first(engine)
    prepare(engine)
    migrated = described(engine)
    with engine.begin() as connection:
        metadata.drop_all(connection)
        connection.execute(sa.text("DROP TABLE quire_batch_version"))
    prepare(engine)
    assert described(engine) == migrated
    assert version(engine) == 1 + len(STEPS)


def test_steps_are_done_once_in_their_order_and_nothing_is_lost(engine):
    make_first(engine)
    Store(engine).add(MADE, 10)
    for steps, expected in (((), 1), ((ADD,), 2), ((ADD,), 2), ((ADD, INDEX), 3), ((ADD, INDEX), 3)):
        prepare(engine, steps)
        assert version(engine) == expected
    assert Store(engine).batch(MADE.owner, MADE.id) == MADE
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT color FROM batches")) == "red"
    assert "batches_by_color" in {one["name"] for one in sa.inspect(engine).get_indexes("batches")}


def test_workers_that_start_together_do_each_step_once(url):
    engines = [connect(url) for _ in range(4)]
    prepare(engines[0], ())
    failures = []

    def start(engine):
        try:
            prepare(engine, (ADD, INDEX))
        except sa.exc.SQLAlchemyError as error:
            failures.append(error)

    threads = [threading.Thread(target=start, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and version(engines[0]) == 3
    for engine in engines:
        engine.dispose()


def test_of_steps_that_fail_nothing_is_done(engine):
    make_first(engine)
    prepare(engine, ())
    before = described(engine)
    with pytest.raises(sa.exc.SQLAlchemyError):
        prepare(engine, (ADD, ("CREATE INDEX x ON batches (nowhere)",)))
    assert (described(engine), version(engine)) == (before, 1)


def test_a_newer_database_is_refused_in_one_sentence_and_left_as_it_is(keys, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    engine = connect(f"sqlite:///{state / 'batches.sqlite'}")
    prepare(engine, (*STEPS, ADD))
    before = described(engine)
    newest = version(engine)
    with pytest.raises(SchemaError):
        prepare(engine)
    with Process("http://127.0.0.1:9", keys, state) as process:
        assert process.process.wait(60) == 2
        (said,) = process.log.read_text().splitlines()
    assert f"has version {newest} of its schema, and this quire-batch knows {newest - 1} at most" in said
    assert (described(engine), version(engine)) == (before, newest)
    engine.dispose()
