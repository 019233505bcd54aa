"""Races two attempts at one request: the first that has an answer is kept, the other one is ended at once.

The shell around a decision that is made elsewhere: after which time, and whether, there is a second one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from quire_gateway.attempt import AttemptError


class Closable(Protocol):
    """What has begun, and has to be ended."""

    def close(self) -> None:
        """End it."""


T = TypeVar("T", bound=Closable)
Start = Coroutine[Any, Any, T]


async def race(first: Start[T], seconds: float, another: Callable[[], Start[T] | None]) -> T:
    """What the first attempt to have an answer returns. Raises AttemptError where none has one. ``another``:
    the second attempt, asked for after so many seconds without an answer of the first.
    """
    tasks = {asyncio.create_task(first)}
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds)
        if not done and (second := another()) is not None:
            tasks.add(asyncio.create_task(second))
        winner = await _first_success(tasks)
        await _end(tasks - {winner})
        return winner.result()
    except BaseException:  # the client may hang up at any time
        await _end(tasks)
        raise


async def _first_success(tasks: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """The first one that does not fail; the last one where all do."""
    pending = tasks
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not isinstance(task.exception(), AttemptError):
                return task
        if not pending:
            return task


async def _end(tasks: set[asyncio.Task[T]]) -> None:
    """Cancel these, and close what one of them has returned already."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(result, BaseException):
            result.close()
