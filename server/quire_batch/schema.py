"""Which version the tables of a database have, and how an older one becomes that of this program.

A table of one row has the version. A step is some statements that are the same for SQLite and PostgreSQL; all
steps that a database lacks run in the transaction that notes its new version, so that it has all of them or
none. A step only adds, with defaults: workers of the version before go on until they are replaced. Knows no
rows of the other tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from quire_batch.tables import WRITES, metadata

_LOCK = 7190249  # of PostgreSQL, for workers that start together

#: The statements from each version to the next one, from version 1 on. `tables` has the tables of the last.
STEPS: Sequence[Sequence[str]] = ()

_version = sa.Table("quire_batch_version", sa.MetaData(), sa.Column("version", sa.Integer, nullable=False))


class SchemaError(Exception):
    """The database is of a newer program."""


def prepare(engine: Engine, steps: Sequence[Sequence[str]] = STEPS) -> None:
    """Make the tables, or bring those that are there to this version. Raises SchemaError."""
    latest = 1 + len(steps)
    with engine.execution_options(**{WRITES: True}).begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        found = _found(connection)
        if found is None:
            metadata.create_all(connection)
            found = latest
        if found > latest:
            raise SchemaError(
                f"it has version {found} of its schema, and this quire-batch knows {latest} at most: "
                "run the version of quire-batch that has made it, or a newer one"
            )
        for step in steps[found - 1 :]:
            for statement in step:
                connection.execute(sa.text(statement))
        _note(connection, latest)


def _found(connection: Connection) -> int | None:
    """The version, or None of a database without tables. Those without a version are of the first one."""
    inspector = sa.inspect(connection)
    if inspector.has_table(_version.name):
        return int(connection.execute(sa.select(_version.c.version)).scalar_one())
    return 1 if inspector.has_table("batches") else None


def _note(connection: Connection, version: int) -> None:
    _version.create(connection, checkfirst=True)
    connection.execute(sa.delete(_version))
    connection.execute(_version.insert().values(version=version))
