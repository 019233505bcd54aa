"""How much one client may ask for in a minute, in requests and in tokens: a bucket for each, filled evenly.

Called by `completions`. A request is charged when it comes, and gets that back where the house has no place
for it; tokens of its answer are charged when it ends, so that a bucket can be in debt, which the client waits
for before the next request. Holds nothing of clients whose buckets are full again. Pure but for the clock
that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire_server.api.errors import ApiError, limited

_MINUTE = 60.0


@dataclass(frozen=True)
class RateLimits:
    """What each API key may ask for in a minute. None is no limit."""

    requests: int | None = None
    tokens: int | None = None


class _Bucket:
    def __init__(self, capacity: int, now: float) -> None:
        self.capacity = capacity
        self._level, self._at = float(capacity), now

    def level(self, now: float) -> float:
        refill = (now - self._at) * self.capacity / _MINUTE
        return min(self._level + refill, float(self.capacity))

    def take(self, amount: float, now: float) -> None:
        self._level, self._at = self.level(now) - amount, now

    def seconds_until(self, amount: float, now: float) -> float:
        """0 when so much is there; a full bucket never makes anybody wait."""
        lacking = min(amount, self.capacity) - self.level(now)
        return max(lacking, 0.0) * _MINUTE / self.capacity


class Rates:
    """The buckets of all clients that asked for something lately."""

    def __init__(self, limits: RateLimits, clock: Callable[[], float]) -> None:
        self._limits = {
            kind: limit
            for kind, limit in (("requests", limits.requests), ("tokens", limits.tokens))
            if limit is not None
        }
        self._clock = clock
        self._buckets: dict[str, dict[str, _Bucket]] = {}

    def enter(self, client: str, prompt_tokens: int) -> None:
        """Charge a request and its prompt, or raise a 429 that says when to come again."""
        now = self._clock()
        self._forget_rested(now)
        buckets = self._of(client, now)
        amounts = {"requests": 1, "tokens": prompt_tokens}
        for kind, bucket in buckets.items():
            if (seconds := bucket.seconds_until(max(amounts[kind], 1), now)) > 0:
                raise self._refusal(client, kind, bucket, seconds)
        for kind, bucket in buckets.items():
            bucket.take(amounts[kind], now)

    def spend(self, client: str, num_tokens: int) -> None:
        """Charge tokens that nobody could foresee: the answer's, and what the prompt was mistaken by."""
        now = self._clock()
        if (bucket := self._of(client, now).get("tokens")) is not None:
            bucket.take(num_tokens, now)

    def refund(self, client: str) -> None:
        """Give a request back that was refused unserved; its tokens go back by `spend`, of less than none."""
        now = self._clock()
        if (bucket := self._of(client, now).get("requests")) is not None:
            bucket.take(-1, now)

    def headers(self, client: str) -> Iterator[tuple[str, str]]:
        """What is left, in OpenAI's headers."""
        now = self._clock()
        for kind, bucket in self._of(client, now).items():
            yield f"x-ratelimit-limit-{kind}", str(bucket.capacity)
            yield f"x-ratelimit-remaining-{kind}", str(max(math.floor(bucket.level(now)), 0))
            yield f"x-ratelimit-reset-{kind}", f"{bucket.seconds_until(bucket.capacity, now):.3f}s"

    def _of(self, client: str, now: float) -> dict[str, _Bucket]:
        if client not in self._buckets:
            self._buckets[client] = {kind: _Bucket(limit, now) for kind, limit in self._limits.items()}
        return self._buckets[client]

    def _refusal(self, client: str, kind: str, bucket: _Bucket, seconds: float) -> ApiError:
        message = f"This key may ask for {bucket.capacity} {kind} a minute, and has: wait {seconds:.0f} s."
        refusal = limited(message, max(math.ceil(seconds), 1))
        refusal.headers += tuple(self.headers(client))
        return refusal

    def _forget_rested(self, now: float) -> None:
        """Clients with keys are few; what is dropped are those whose key is gone."""
        rested = [
            client
            for client, buckets in self._buckets.items()
            if all(bucket.level(now) >= bucket.capacity for bucket in buckets.values())
        ]
        for client in rested:
            del self._buckets[client]
