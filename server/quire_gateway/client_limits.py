"""The limits of LLMClients at one gateway: requests and tokens a minute, and requests at once.

What a request may take is reserved before it is relayed, and settled with what it took when it is over. Each
gateway gives out its share of a limit, by the number of gateways that run: they need no store, and a client
whose requests all go to one of them gets that share alone. Pure but for the clock that it is given.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from quire_gateway.llm_client import LLMClient
from quire_http.errors import limited
from quire_http.rate_limit import RateLimits, Rates

_RETRY_AFTER_SECONDS = 1


@dataclass(slots=True)
class Reservation:
    """What one request holds of its client's limits, until it is settled."""

    num_tokens: int
    _limiter: ClientLimiter
    _uid: str
    _is_settled: bool = False

    def headers(self) -> tuple[tuple[str, str], ...]:
        """What is left to the client, in OpenAI's headers."""
        return tuple(self._limiter.rates.headers(self._uid))

    def settle(self, num_tokens: int, *, is_served: bool = True) -> None:
        """The request is over and took so many tokens. One that was not served costs nothing."""
        if self._is_settled:
            return
        self._is_settled = True
        self._limiter.running[self._uid] -= 1
        self._limiter.running += Counter()  # drops what is zero
        if not is_served:
            self._limiter.rates.refund(self._uid)
        self._limiter.rates.spend(self._uid, (num_tokens if is_served else 0) - self.num_tokens)


class ClientLimiter:
    """Admits requests. ``num_gateways``: those that run now."""

    def __init__(self, num_gateways: Callable[[], int], clock: Callable[[], float]) -> None:
        self._num_gateways = num_gateways
        self._clients: dict[str, LLMClient] = {}  # as they were at their last request, by UID
        self.running: Counter[str] = Counter()
        self.rates = Rates(self._limits_of, clock)

    def reserve(self, client: LLMClient, num_tokens: int) -> Reservation:
        """Reserve a request and its tokens. Raises a 429 with the time to wait."""
        self._clients[client.uid] = client
        most = client.limits.concurrent_requests
        if most is not None and self.running[client.uid] >= math.ceil(most * self._share()):
            message = f"This client may have {most} requests at once, and has: wait for one to end."
            raise limited(message, _RETRY_AFTER_SECONDS)
        self.rates.charge(client.uid, num_tokens)
        self.running[client.uid] += 1
        return Reservation(num_tokens, self, client.uid)

    def _share(self) -> float:
        return 1 / max(self._num_gateways(), 1)

    def _limits_of(self, uid: str) -> RateLimits:
        limits = self._clients[uid].limits
        return RateLimits(limits.requests_per_minute, limits.tokens_per_minute, self._share())
