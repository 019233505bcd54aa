"""Records what happened in a test run, as lines of a file that all its processes append to.

Imports next to nothing, since it is loaded into each process that a test starts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

#: Names the folder of the records. Without it nothing is recorded.
VARIABLE = "FAILURE_PATHS"

_FILE = "records"
_recorded: set[str] = set()


def record(kind: str, name: str) -> None:
    """Record that `name` happened, once a process."""
    folder, line = os.environ.get(VARIABLE), f"{kind} {name}\n"
    if not folder or line in _recorded:
        return
    _recorded.add(line)
    # Where a test lets no file be opened or grow, this line is lost, and the check says that it is missing.
    with contextlib.suppress(OSError):
        descriptor = os.open(f"{folder}/{_FILE}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def record_status(status: Mapping[str, Any]) -> None:
    """Record the reasons in the conditions of a status that a test has read."""
    for each in status.get("conditions", ()):
        record("condition", f"{each['type']}={each['status']} {each['reason']}")


def read(folder: str) -> set[str]:
    """All records of a run. FileNotFoundError where there are none."""
    with open(f"{folder}/{_FILE}", encoding="utf-8") as file:
        return set(file.read().splitlines())


class RecordedSuppress(contextlib.suppress):
    """contextlib.suppress, which records that it has suppressed an exception."""

    def __init__(self, handler: str, *exceptions: type[BaseException]) -> None:
        super().__init__(*exceptions)
        self._handler = handler

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        is_suppressed = super().__exit__(kind, error, traceback)
        if is_suppressed:
            record("except", self._handler)
        return is_suppressed
