"""One pod that serves a model: where it answers, and how busy it is.

The load is what this gateway has in flight there, and what others had at the last poll; old numbers are left
out, and keep no request away. Pure; policies and attempts share it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

STALE_SECONDS = 5.0
_HINT_LENGTH = 12


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a pod answers."""

    uid: str
    address: str
    port: int
    health_port: int

    @property
    def url(self) -> str:
        """The root of its API."""
        return f"http://{self._host}:{self.port}"

    @property
    def health_url(self) -> str:
        """The root of its health process."""
        return f"http://{self._host}:{self.health_port}"

    @property
    def hint(self) -> str:
        """What ids of responses begin with that this pod keeps; says nothing about the pod."""
        return hashlib.sha256(self.uid.encode()).hexdigest()[:_HINT_LENGTH]

    @property
    def _host(self) -> str:
        return f"[{self.address}]" if ":" in self.address else self.address


class Replica:
    """One pod that serves a model."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.in_flight = 0  # of this gateway
        self._of_others = 0  # at the last poll
        self._polled_at = float("-inf")

    def load(self, now: float) -> int:
        """Requests that wait or run there."""
        return self.in_flight + (0 if self.is_stale(now) else self._of_others)

    def is_stale(self, now: float) -> bool:
        """Whether the last poll was too long ago to count."""
        return now - self._polled_at > STALE_SECONDS

    def polled(self, total: int, now: float) -> None:
        """The replica has so many requests in all, a part of which is in flight here."""
        self._of_others, self._polled_at = max(0, total - self.in_flight), now
