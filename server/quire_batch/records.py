"""What is stored of files, batches, jobs and their lines, as the rest of the program reads it. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

_MOST_OF_NAME = 200  # of 256 characters


class Status(StrEnum):
    """Of a batch or a job, in OpenAI's words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


#: Those in which something is still to be done.
OPEN = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)


class LineState(StrEnum):
    """Of a line."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


#: Those of a line that is not over. Of a batch that has ended it is asked for no more.
UNANSWERED = (LineState.WAITING, LineState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file; its bytes are elsewhere, under its id."""

    id: str
    owner: str  # the client's full name; empty: of all without keys
    filename: str
    purpose: str
    bytes: int
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch, or a job: a batch of one line that has no file."""

    id: str
    owner: str
    is_job: bool = False
    endpoint: str
    status: Status
    delegation: str = field(repr=False)  # by which the gateway knows whom a line is for
    input_file_id: str = ""
    output_file_id: str = ""
    error_file_id: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)  # metadata, and the errors of a validation
    times: Mapping[str, int] = field(default_factory=dict)  # when it came into a status, by OpenAI's names
    created_at: int
    expires_at: int
    total: int = 0
    completed: int = 0
    failed: int = 0
    webhook: str = ""


@dataclass(frozen=True, slots=True)
class Running:
    """A batch or a job whose lines may be asked for."""

    id: str
    owner: str
    is_job: bool

    @property
    def lane(self) -> str:
        """What has one concurrency: a batch, or all jobs of a client, each of which is a line."""
        return f"jobs of {self.owner}" if self.is_job else self.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A line that this worker has taken."""

    batch_id: str
    number: int
    endpoint: str
    delegation: str = field(repr=False)
    body: bytes = field(repr=False)
    take: int  # how often it was taken: a worker that has lost it writes nothing
    failures: int
    losses: int = 0  # to workers that died while they had it


@dataclass(frozen=True, slots=True)
class Result:
    """A line. ``result``: OpenAI's `response`, of one that was answered."""

    number: int
    custom_id: str
    state: LineState
    result: bytes


def incarnation(name: str) -> str:
    """The name of one process of a worker, by which its leases are its own. A pod comes back with its name
    while the process before it may still run, on a node that was cut off.
    """
    return f"{name[:_MOST_OF_NAME]}/{secrets.token_hex(8)}"


def name_of(incarnation_: str) -> str:
    """The part that the processes of a worker share, with what ends it."""
    return incarnation_[: incarnation_.rindex("/") + 1]


def new_id(kind: str) -> str:
    """Not to be guessed, though it is no secret."""
    return f"{kind}{secrets.token_hex(16)}"
