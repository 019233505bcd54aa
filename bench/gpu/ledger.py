"""What a part has measured so far, in a file of its own that is written after every row: a run that is
stopped, or that a kernel brought down, goes on where it was.
"""

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_STARTED, _ERROR = "started", "error"
_ENDED = "the process ended within it, or was ended when the part's time was up"


class OutOfTimeError(Exception):
    """The part's time is up; what is missing is measured by the next run."""


class Ledger:
    """Rows by key, ``deadline`` in seconds of ``time.time``; ``check`` raises where the device is broken. A
    row that was begun and never ended took the process with it: it is not tried again.
    """

    def __init__(
        self, path: Path, machine: Mapping[str, str], deadline: float, check: Callable[[], object] = bool
    ) -> None:
        self._path, self._deadline, self._check = path, deadline, check
        self._document: dict[str, Any] = read(path) or {"machine": dict(machine), "rows": {}}
        for key, row in self.rows.items():
            if row == {_STARTED: True}:
                self._put(key, {_ERROR: _ENDED})

    @property
    def folder(self) -> Path:
        """Where it lies, and what else a part leaves may lie."""
        return self._path.parent

    @property
    def seconds_left(self) -> float:
        """Of the part's time."""
        return self._deadline - time.time()

    @property
    def rows(self) -> dict[str, Row]:
        """As measured so far."""
        found: dict[str, Row] = self._document["rows"]
        return found

    def has(self, key: str) -> bool:
        """Whether nothing is left to do for this row."""
        return key in self.rows

    def measure(self, key: str, compute: Callable[[], Row]) -> None:
        """Fill a row unless it is there. What goes wrong becomes the row, and ends the process where the
        device is of no use any more; raises OutOfTimeError.
        """
        if self.has(key):
            return
        if time.time() > self._deadline:
            raise OutOfTimeError(key)
        self._put(key, {_STARTED: True})
        began = time.perf_counter()
        try:
            row = compute()
        except Exception as error:
            # A wrong number is what this is not to print: every failure is a row, with its reason.
            traceback.print_exc()
            row = {_ERROR: f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        self._put(key, row)
        if _ERROR in row:
            self._check()
        print(f"  {key}: {_short(row)} ({time.perf_counter() - began:.1f} s)", flush=True)

    def _put(self, key: str, row: Row) -> None:
        self.rows[key] = row
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps(self._document, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self._path)


def read(path: Path) -> dict[str, Any] | None:
    """The file of a part, if it was ever begun."""
    if not path.exists():
        return None
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _short(row: Row) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in row.items())


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
