"""The producer's holds, shared between the engine, which adds and frees them, and the threads that serve
readers.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

from quire_server.core.transfer import ID_BYTES, Hold, Holds, Reference


class SharedHolds:
    """``core.transfer.Holds`` under a lock, with the clock and random generations."""

    def __init__(self, lease_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.incarnation = secrets.token_bytes(ID_BYTES)
        self.lease_seconds = lease_seconds
        self._holds = Holds(self.incarnation, lease_seconds)
        self._clock = clock
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, prefix: bytes, block_ids: Sequence[int]) -> Reference:
        """Hold blocks from now on; ``prefix`` is the digest of their tokens and salt."""
        with self._lock:
            return self._holds.add(secrets.token_bytes(ID_BYTES), prefix, block_ids, self._clock())

    def readable(self, reference: Reference, first: int) -> tuple[int, ...]:
        """The blocks from an index on. Raises TransferError."""
        with self._lock:
            return self._holds.readable(reference, first, self._clock())

    def confirm(self, reference: Reference) -> None:
        """They were read while they were held. Raises TransferError where they were not."""
        with self._lock:
            self._holds.confirm(reference, self._clock())

    def cancel(self, generation: bytes) -> None:
        """Their reader has gone."""
        with self._lock:
            self._holds.cancel(generation)

    def take_ended(self) -> list[Hold]:
        """Those whose blocks are to be freed."""
        with self._lock:
            return self._holds.take_ended(self._clock())
