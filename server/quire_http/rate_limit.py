"""Rate limits of each client, in requests and in tokens a minute: a token bucket for each.

A request is charged once it is parsed, and refunded where it is shed; the tokens of its answer are charged
when it ends, so that a bucket can be negative, and the client has to wait before its next request. One of
several servers enforces a share of each limit. Full buckets are forgotten. Pure but for the clock that it is
given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from quire_http.errors import ApiError, limited

_MINUTE = 60.0
_ROUNDING = 1e-9
_FEW = 64  # clients


class RateLimits(NamedTuple):
    """What a client may ask for in a minute, None: no limit; and the share of it that is given out here."""

    requests: int | None = None
    tokens: int | None = None
    share: float = 1.0


class _Bucket:
    """What is left of a limit: ``level`` as of the last `refill`."""

    def __init__(self, limit: int, share: float, now: float) -> None:
        self.limit = limit
        self.capacity = self.level = limit * share
        self._at = now

    def refill(self, now: float) -> None:
        refilled = self.level + (now - self._at) * self.capacity / _MINUTE
        self.level, self._at = min(refilled, self.capacity), now

    def resized(self, limit: int, share: float, now: float) -> _Bucket:
        """One of another capacity from now on; as full, or as much in debt, as this one."""
        other = _Bucket(limit, share, now)
        self.refill(now)
        other.level = self.level / self.capacity * other.capacity
        return other

    def seconds_until(self, amount: float) -> float:
        """0 when so much is there; a full bucket is enough for any amount."""
        lacking = min(amount, self.capacity) - self.level
        return max(lacking, 0.0) * _MINUTE / self.capacity


_NONE: tuple[RateLimits | None, dict[str, _Bucket]] = (None, {})


class Rates:
    """The buckets of all clients with recent requests. ``limits_of``: those of a client, as they are now."""

    def __init__(self, limits_of: Callable[[str], RateLimits], clock: Callable[[], float]) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._buckets: dict[str, tuple[RateLimits | None, dict[str, _Bucket]]] = {}  # made for these
        self._many = _FEW  # at so many they are looked through

    def check(self, client: str, prompt_tokens: int = 0) -> None:
        """Raise a 429 with the time to wait where a request with such a prompt cannot be charged."""
        self._check(client, prompt_tokens, self._clock())

    def _check(self, client: str, prompt_tokens: int, now: float) -> dict[str, _Bucket]:
        """As `check`; returns the buckets."""
        if len(self._buckets) >= self._many:
            self._forget_full(now)
        buckets = self._of(client, now)
        for kind, bucket in buckets.items():
            amount = 1 if kind == "requests" else prompt_tokens
            if bucket.level < min(amount or 1, bucket.capacity):
                raise self.refusal(client, kind, amount)
        return buckets

    def charge(self, client: str, prompt_tokens: int) -> None:
        """Charge a request and its prompt. Raises as `check`."""
        now = self._clock()
        buckets = self._check(client, prompt_tokens, now)
        for kind, bucket in buckets.items():
            bucket.level -= 1 if kind == "requests" else prompt_tokens

    def spend(self, client: str, num_tokens: int) -> None:
        """Charge tokens that were not known before: the answer's, and the error of the prompt's estimate."""
        if (bucket := self._of(client, self._clock()).get("tokens")) is not None:
            bucket.level -= num_tokens

    def refund(self, client: str) -> None:
        """Refund a request that was refused unserved; its tokens are refunded by a negative `spend`."""
        if (bucket := self._of(client, self._clock()).get("requests")) is not None:
            bucket.level += 1

    def levels(self, client: str) -> dict[str, float]:
        """What is left of each limit, as if the share given out here were the whole of it."""
        buckets, share = self._of(client, self._clock()), self._limits_of(client).share
        return {kind: bucket.level / share for kind, bucket in buckets.items()}

    def set_levels(self, client: str, levels: Mapping[str, float]) -> None:
        """So much is left of each whole limit, and of it the share here."""
        buckets, share = self._of(client, self._clock()), self._limits_of(client).share
        for kind, bucket in buckets.items():
            if kind in levels:
                bucket.level = levels[kind] * share

    def headers(self, client: str) -> Iterator[tuple[str, str]]:
        """What was left when it was last looked at, in OpenAI's headers."""
        for kind, bucket in self._buckets.get(client, _NONE)[1].items():
            remaining = max(math.floor(bucket.level * bucket.limit / bucket.capacity + _ROUNDING), 0)
            yield f"x-ratelimit-limit-{kind}", str(bucket.limit)
            yield f"x-ratelimit-remaining-{kind}", str(remaining)
            yield f"x-ratelimit-reset-{kind}", f"{bucket.seconds_until(bucket.capacity):.3f}s"

    def _of(self, client: str, now: float) -> dict[str, _Bucket]:
        limits = self._limits_of(client)
        known, buckets = self._buckets.get(client, _NONE)
        if known != limits:
            each = {"requests": limits.requests, "tokens": limits.tokens}
            buckets = {
                kind: buckets[kind].resized(limit, limits.share, now)
                if kind in buckets
                else _Bucket(limit, limits.share, now)
                for kind, limit in each.items()
                if limit is not None
            }
            self._buckets[client] = limits, buckets
        for bucket in buckets.values():
            bucket.refill(now)
        return buckets

    def refusal(self, client: str, kind: str, amount: float) -> ApiError:
        """The 429 for a request for so much of a limit, with the time until it is there."""
        bucket = self._of(client, self._clock())[kind]
        seconds = bucket.seconds_until(max(amount, 1))
        message = f"This key may ask for {bucket.limit} {kind} a minute, and has: wait {seconds:.0f} s."
        refusal = limited(message, max(math.ceil(seconds), 1))
        refusal.headers += tuple(self.headers(client))
        return refusal

    def _forget_full(self, now: float) -> None:
        """Keep no state of clients whose key is gone. Not at each request: it looks at all of them."""
        full = []
        for client, (_, buckets) in self._buckets.items():
            for bucket in buckets.values():
                bucket.refill(now)
            if all(bucket.level >= bucket.capacity for bucket in buckets.values()):
                full.append(client)
        for client in full:
            del self._buckets[client]
        self._many = max(_FEW, 2 * len(self._buckets))
