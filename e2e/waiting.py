"""The one way in which a test waits: for a condition, within a limit, failing with what was awaited.

The limit is against hangs, never a bar for a time: it fits a machine on which everything else runs as well.
It is shorter than the operator's resync, which would hide that an event was missed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

HANG_SECONDS = 120


def eventually(
    what: str, probe: Callable[[], T | None], *, seconds: float = HANG_SECONDS, poll: float = 0.05
) -> T:
    """The first truthy answer of `probe`; after `seconds` an AssertionError that says `what`.

    A KeyError is no answer: what an object lacks may still come.
    """
    until = time.monotonic() + seconds
    while True:
        answer, lacks = None, ""
        try:
            answer = probe()
        except KeyError as error:
            lacks = f", there is no {error}"
        if answer:
            return answer
        assert time.monotonic() < until, (
            f"not within {seconds:.0f} s: {what} (last answer: {answer!r}{lacks})"
        )
        time.sleep(poll)
