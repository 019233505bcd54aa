"""Calls the store, again while it fails: what is to be written is nowhere else.

A database that is away, or a disk that is full, ends nothing. It is logged once, until a call succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from quire_batch.contents import ContentsError
from quire_batch.metrics import Metrics
from quire_batch.store import STORE_ERRORS

logger = logging.getLogger(__name__)

#: What passes by itself.
PASSING = (*STORE_ERRORS, ContentsError)
_FIRST_SECONDS, _LONGEST_SECONDS = 0.5, 10.0

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class Patience:
    """That of one process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._is_failing = False

    async def call(
        self, function: Callable[Parameters, Returned], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Returned:
        """The function's result; it runs in a thread."""
        delay = _FIRST_SECONDS
        while True:
            try:
                result = await asyncio.to_thread(function, *args, **kwargs)
            except PASSING as error:
                self.failed(error)
            else:
                self.succeeded()
                return result
            await asyncio.sleep(delay)  # the store does not say when it is back
            delay = min(2 * delay, _LONGEST_SECONDS)

    def failed(self, error: Exception) -> None:
        """A call has failed."""
        self._metrics.store_errors.inc()
        if not self._is_failing:
            logger.error("the store fails; work goes on when it is back", extra={"why": brief(error)})
        self._is_failing = True

    def succeeded(self) -> None:
        """A call has not."""
        if self._is_failing:
            logger.info("the store is back")
        self._is_failing = False


def brief(error: Exception) -> str:
    """What failed, without the statement and its values, in which prompts are."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0]
