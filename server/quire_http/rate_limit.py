"""Rate limits of each client, in requests and in tokens a minute: a token bucket for each.

A request is charged once it is parsed, and refunded where it is shed; the tokens of its answer are charged
when it ends, so that a bucket can be negative, and the client has to wait before its next request. One of
several servers enforces a share of each limit. Full buckets are forgotten. Pure but for the clock that it is
given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from quire_http.errors import ApiError, limited

_MINUTE = 60.0
_ROUNDING = 1e-9
_FEW = 64  # clients


@dataclass(frozen=True)
class RateLimits:
    """What a client may ask for in a minute, None: no limit; and the share of it that is given out here."""

    requests: int | None = None
    tokens: int | None = None
    share: float = 1.0


class _Bucket:
    def __init__(self, capacity: float, now: float) -> None:
        self.capacity = capacity
        self._level, self._at = capacity, now

    def level(self, now: float) -> float:
        refill = (now - self._at) * self.capacity / _MINUTE
        return min(self._level + refill, self.capacity)

    def resize(self, capacity: float, now: float) -> None:
        """Another capacity from now on; as full, or as much in debt, as before."""
        level = self.level(now) / self.capacity * capacity
        self.capacity, self._level, self._at = capacity, level, now

    def take(self, amount: float, now: float) -> None:
        self._level, self._at = self.level(now) - amount, now

    def set(self, level: float, now: float) -> None:
        self._level, self._at = level, now

    def seconds_until(self, amount: float, now: float) -> float:
        """0 when so much is there; a full bucket is enough for any amount."""
        lacking = min(amount, self.capacity) - self.level(now)
        return max(lacking, 0.0) * _MINUTE / self.capacity


class Rates:
    """The buckets of all clients with recent requests. ``limits_of``: those of a client, as they are now."""

    def __init__(self, limits_of: Callable[[str], RateLimits], clock: Callable[[], float]) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._buckets: dict[str, dict[str, _Bucket]] = {}
        self._many = _FEW  # at so many they are looked through

    def check(self, client: str, prompt_tokens: int = 0) -> None:
        """Raise a 429 with the time to wait where a request with such a prompt cannot be charged."""
        now = self._clock()
        self._forget_full(now)
        amounts = {"requests": 1, "tokens": prompt_tokens}
        for kind, bucket in self._of(client, now).items():
            if bucket.seconds_until(max(amounts[kind], 1), now) > 0:
                raise self.refusal(client, kind, amounts[kind])

    def charge(self, client: str, prompt_tokens: int) -> None:
        """Charge a request and its prompt. Raises as `check`."""
        self.check(client, prompt_tokens)
        self.take(client, prompt_tokens)

    def take(self, client: str, prompt_tokens: int) -> None:
        """Charge a request that `check` has let pass."""
        now = self._clock()
        amounts = {"requests": 1, "tokens": prompt_tokens}
        for kind, bucket in self._of(client, now).items():
            bucket.take(amounts[kind], now)

    def spend(self, client: str, num_tokens: int) -> None:
        """Charge tokens that were not known before: the answer's, and the error of the prompt's estimate."""
        now = self._clock()
        if (bucket := self._of(client, now).get("tokens")) is not None:
            bucket.take(num_tokens, now)

    def refund(self, client: str) -> None:
        """Refund a request that was refused unserved; its tokens are refunded by a negative `spend`."""
        now = self._clock()
        if (bucket := self._of(client, now).get("requests")) is not None:
            bucket.take(-1, now)

    def levels(self, client: str) -> dict[str, float]:
        """What is left of each limit, as if the share given out here were the whole of it."""
        now, share = self._clock(), self._limits_of(client).share
        return {kind: bucket.level(now) / share for kind, bucket in self._of(client, now).items()}

    def set_levels(self, client: str, levels: Mapping[str, float]) -> None:
        """So much is left of each whole limit, and of it the share here."""
        now, share = self._clock(), self._limits_of(client).share
        for kind, bucket in self._of(client, now).items():
            if kind in levels:
                bucket.set(levels[kind] * share, now)

    def headers(self, client: str) -> Iterator[tuple[str, str]]:
        """What is left, in OpenAI's headers."""
        now, limits = self._clock(), self._limits_of(client)
        for kind, bucket in self._of(client, now).items():
            remaining = max(math.floor(bucket.level(now) / limits.share + _ROUNDING), 0)
            yield f"x-ratelimit-limit-{kind}", str(_by_kind(limits)[kind])
            yield f"x-ratelimit-remaining-{kind}", str(remaining)
            yield f"x-ratelimit-reset-{kind}", f"{bucket.seconds_until(bucket.capacity, now):.3f}s"

    def _of(self, client: str, now: float) -> dict[str, _Bucket]:
        limits = self._limits_of(client)
        capacities = {kind: limit * limits.share for kind, limit in _by_kind(limits).items()}
        buckets = self._buckets.setdefault(client, {})
        if buckets.keys() != capacities.keys():
            buckets = {kind: buckets.get(kind, _Bucket(each, now)) for kind, each in capacities.items()}
            self._buckets[client] = buckets
        for kind, bucket in buckets.items():
            if bucket.capacity != capacities[kind]:
                bucket.resize(capacities[kind], now)
        return buckets

    def refusal(self, client: str, kind: str, amount: float) -> ApiError:
        """The 429 for a request for so much of a limit, with the time until it is there."""
        now, limit = self._clock(), _by_kind(self._limits_of(client))[kind]
        seconds = self._of(client, now)[kind].seconds_until(max(amount, 1), now)
        message = f"This key may ask for {limit} {kind} a minute, and has: wait {seconds:.0f} s."
        refusal = limited(message, max(math.ceil(seconds), 1))
        refusal.headers += tuple(self.headers(client))
        return refusal

    def _forget_full(self, now: float) -> None:
        """Keep no state of clients whose key is gone. Not at each request: it looks at all of them."""
        if len(self._buckets) < self._many:
            return
        full = [
            client
            for client, buckets in self._buckets.items()
            if all(bucket.level(now) >= bucket.capacity for bucket in buckets.values())
        ]
        for client in full:
            del self._buckets[client]
        self._many = max(_FEW, 2 * len(self._buckets))


def _by_kind(limits: RateLimits) -> dict[str, int]:
    """Those that there are."""
    both = {"requests": limits.requests, "tokens": limits.tokens}
    return {kind: limit for kind, limit in both.items() if limit is not None}
