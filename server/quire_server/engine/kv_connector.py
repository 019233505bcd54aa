"""The engine's part in transfers of KV blocks between servers, for a server that takes none: what the engine
core calls, without effect. ``kv_producer`` and ``kv_consumer`` are the two roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from quire_server.core.request import Request
from quire_server.core.stats import TransferStats
from quire_server.core.step import StepEvents


class KVConnector:
    """Every method is called by the engine's thread, and returns at once."""

    def start(self, wake: Callable[[], None]) -> None:
        """The engine serves from now on. ``wake`` makes it call ``advance``, from any thread."""

    def add(self, request: Request) -> bool:
        """Whether to fetch the request's prefix before it is scheduled; if so, it is kept here."""
        return False

    def remove(self, request_id: str) -> None:
        """The request has finished or was aborted, here or later."""

    def requests(self) -> Sequence[Request]:
        """Those that are kept here."""
        return ()

    def advance(self) -> Iterator[tuple[Request, int]]:
        """Go on with every transfer; yields requests to be scheduled now, each with how many tokens of its
        prompt were fetched.
        """
        return iter(())

    def take(self, events: StepEvents) -> None:
        """The result of a step."""

    @property
    def is_degraded(self) -> bool:
        """Whether the last prefix that was to be fetched was computed here instead."""
        return False

    def stats(self) -> TransferStats:
        """Gauges and counters."""
        return TransferStats()
