"""One pod that serves a model: where it answers, how busy it is, and which LoRA adapters it has.

The load is what this gateway has in flight there, and what others had at the last poll; old numbers are left
out, and keep no request away. Pure; policies and attempts share it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

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


class AdapterState(Enum):
    """Whether a replica answers for an adapter."""

    READY = auto()
    LOADING = auto()  # it has not begun to, which it does by itself
    FAILED = auto()
    UNKNOWN = auto()  # it has not said so lately


class Replica:
    """One pod that serves a model."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.in_flight = 0  # of this gateway
        self.context_length: int | None = None  # tokens, as it says in its status
        self._of_others = 0  # at the last poll
        self._polled_at = float("-inf")
        self._adapters: Mapping[str, str] = {}  # their states as the pod names them, at the last poll
        self._adapters_at = float("-inf")
        self._lacking: dict[str, float] = {}  # when it has answered since that it does not have one

    def load(self, now: float) -> int:
        """Requests that wait or run there."""
        return self.in_flight + (0 if self.is_stale(now) else self._of_others)

    def is_stale(self, now: float) -> bool:
        """Whether the last poll was too long ago to count."""
        return now - self._polled_at > STALE_SECONDS

    def polled(self, total: int, now: float) -> None:
        """The replica has so many requests in all, a part of which is in flight here."""
        self._of_others, self._polled_at = max(0, total - self.in_flight), now

    def adapter(self, name: str, now: float) -> AdapterState:
        """The state of an adapter. One that was ready is so until the replica says something else."""
        if now - self._lacking.get(name, float("-inf")) <= STALE_SECONDS:
            return AdapterState.LOADING
        state = self._adapters.get(name)
        if state == "Ready":
            return AdapterState.READY
        if now - self._adapters_at > STALE_SECONDS:
            return AdapterState.UNKNOWN
        return AdapterState.FAILED if state in ("Failed", "Unloaded") else AdapterState.LOADING

    def polled_adapters(self, states: Mapping[str, str], now: float) -> None:
        """These are all adapters of the replica; one that is not among them it has not seen yet."""
        self._adapters, self._adapters_at = states, now
        self._lacking.clear()

    def lacks_adapter(self, name: str, now: float) -> None:
        """The replica has answered a request that it does not have this adapter."""
        self._lacking[name] = now
