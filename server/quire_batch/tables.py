"""The tables, for SQLite and PostgreSQL alike, and how each of the two is connected to."""

from __future__ import annotations

import sqlite3
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import ConnectionPoolEntry

#: An option of a connection: its transaction will write.
WRITES = "quire_writes"
_BUSY_SECONDS = 30.0

#: Who changes a table adds a step to `schema`.
metadata = sa.MetaData()

files = sa.Table(
    "files",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(512), nullable=False),
    sa.Column("filename", sa.String(512), nullable=False),
    sa.Column("purpose", sa.String(64), nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Index("files_by_owner", "owner", "created_at", "id"),
    sa.Index("files_by_age", "created_at"),
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(512), nullable=False),
    sa.Column("is_job", sa.Boolean, nullable=False),
    sa.Column("endpoint", sa.String(128), nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("delegation", sa.Text, nullable=False),
    sa.Column("input_file_id", sa.String(64), nullable=False),
    sa.Column("output_file_id", sa.String(64), nullable=False),
    sa.Column("error_file_id", sa.String(64), nullable=False),
    sa.Column("details", sa.Text, nullable=False),  # JSON
    sa.Column("times", sa.Text, nullable=False),  # JSON
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
    sa.Column("total", sa.Integer, nullable=False),
    sa.Column("completed", sa.Integer, nullable=False),
    sa.Column("failed", sa.Integer, nullable=False),
    sa.Column("ends_as", sa.String(16), nullable=False),  # the status after finalizing
    sa.Column("worker", sa.String(256), nullable=False),  # that validates or finalizes it
    sa.Column("lease_until", sa.Float, nullable=False),
    sa.Column("webhook", sa.Text, nullable=False),
    sa.Column("webhook_at", sa.Float),  # when it is due; null: there is none to send
    sa.Column("webhook_failures", sa.Integer, nullable=False),
    sa.Index("batches_by_owner", "owner", "created_at", "id"),
    sa.Index("batches_by_status", "status"),
    sa.Index("batches_by_age", "created_at"),
    sa.Index("batches_by_worker", "worker"),
    sa.Index("batches_by_webhook", "webhook_at"),
)

lines = sa.Table(
    "lines",
    metadata,
    sa.Column("batch_id", sa.String(64), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("custom_id", sa.String(256), nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("prefix", sa.LargeBinary, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("not_before", sa.Float, nullable=False),
    sa.Column("worker", sa.String(256), nullable=False),
    sa.Column("lease_until", sa.Float, nullable=False),
    sa.Column("take", sa.Integer, nullable=False),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("losses", sa.Integer, nullable=False),  # to workers that died
    sa.Column("result", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("batch_id", "custom_id"),
    sa.Index("lines_by_worker", "state", "worker"),
    sa.Index("lines_in_their_order", "batch_id", "state", "prefix", "number"),
)


class DatabaseUrlError(Exception):
    """It is no URL of a database that is used here."""


def connect(url: str) -> Engine:
    """The engine of a URL; nothing is connected yet. Raises DatabaseUrlError. No error says what a statement
    was about: prompts would be in logs.
    """
    try:
        address = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise DatabaseUrlError("it is no URL") from None
    if address.get_backend_name() == "sqlite":
        engine = sa.create_engine(address, connect_args={"timeout": _BUSY_SECONDS}, hide_parameters=True)
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    elif address.get_backend_name() in ("postgres", "postgresql"):
        address = address.set(drivername="postgresql+psycopg")
        timeouts = {"connect_timeout": 5, "options": "-c lock_timeout=30000 -c statement_timeout=300000"}
        engine = sa.create_engine(address, pool_pre_ping=True, connect_args=timeouts, hide_parameters=True)
    else:
        raise DatabaseUrlError("it must begin with postgresql://")
    return engine


def _configure_sqlite(connection: sqlite3.Connection, _record: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # `_begin_sqlite` begins transactions, and not the driver
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    """One that will write takes the lock now: two that read first could not both go on to write."""
    options: Any = connection.get_execution_options()
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(WRITES) else "BEGIN")
