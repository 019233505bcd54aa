"""`eventually` with the timeouts of a story: longer, and polling less often, since the machine is busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from e2e import waiting

T = TypeVar("T")


def eventually(what: str, probe: Callable[[], T | None], *, timeout: float = 240.0, poll: float = 0.2) -> T:
    """As `e2e.waiting.eventually`."""
    return waiting.eventually(what, probe, seconds=timeout, poll=poll)
