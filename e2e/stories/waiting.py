"""The one way in which a story waits: for a condition, within a bound, failing with what was awaited."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(what: str, probe: Callable[[], T | None], *, timeout: float = 60.0, poll: float = 0.2) -> T:
    """Returns the first truthy answer of `probe`; after `timeout` seconds fails with `what`."""
    deadline = time.monotonic() + timeout
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:.0f} s: {what} (last answer: {answer!r})")
        time.sleep(poll)
