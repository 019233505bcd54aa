"""What LLMClients may ask for at one gateway: requests and tokens a minute, requests at once, and a budget.

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
from quire_gateway.llm_route import Prices
from quire_gateway.usage_ledger import Spending, UsageLedger, spending
from quire_http.errors import limited
from quire_http.rate_limit import RateLimits, Rates

_RETRY_AFTER_SECONDS = 1


@dataclass(slots=True)
class Reservation:
    """What one request may take of its client's limits and budget, until it is settled."""

    client: LLMClient
    most: Spending
    _limiter: ClientLimiter
    _prices: Prices
    _is_settled: bool = False

    def headers(self) -> tuple[tuple[str, str], ...]:
        """What is left to the client, in OpenAI's headers."""
        return tuple(self._limiter.rates.headers(self.client.uid))

    def settle(self, prompt_tokens: int, completion_tokens: int) -> None:
        """The request is over, and took this."""
        self._end(spending(prompt_tokens, completion_tokens, self._prices))

    def settle_whole(self) -> None:
        """It is over, and took as much as it could, for all that is known."""
        self._end(self.most)

    def release(self) -> None:
        """It is over, and nothing was done for it."""
        if not self._is_settled:
            self._limiter.rates.refund(self.client.uid)
        self._end(Spending())

    def _end(self, spent: Spending) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        limiter, uid = self._limiter, self.client.uid
        limiter.rates.spend(uid, spent.tokens - self.most.tokens)
        limiter.ledger.settle(self.client, self.most, spent)
        limiter.running[uid] -= 1
        limiter.forget_idle(uid)


class ClientLimiter:
    """Admits requests. ``num_gateways``: those that run now."""

    def __init__(
        self, num_gateways: Callable[[], int], ledger: UsageLedger, clock: Callable[[], float]
    ) -> None:
        self._num_gateways = num_gateways
        self.clients: dict[str, LLMClient] = {}  # of running requests, as of the last one, by UID
        self.running: Counter[str] = Counter()
        self.ledger = ledger
        self.rates = Rates(self._limits_of, clock)

    def reserve(
        self, client: LLMClient, prompt_tokens: int, completion_tokens: int, prices: Prices
    ) -> Reservation:
        """Reserve a request with so many tokens. Raises a 429, which says how long to wait if that helps."""
        self.clients[client.uid] = client
        try:
            return self._reserve(client, spending(prompt_tokens, completion_tokens, prices), prices)
        finally:
            self.forget_idle(client.uid)

    def forget_idle(self, uid: str) -> None:
        """Keep nothing of a client without requests but its rates."""
        if not self.running[uid]:
            del self.running[uid]
            del self.clients[uid]

    def _reserve(self, client: LLMClient, most: Spending, prices: Prices) -> Reservation:
        at_once = client.limits.concurrent_requests
        if at_once is not None and self.running[client.uid] >= math.ceil(at_once * self._share()):
            message = f"This client may have {at_once} requests at once, and has: wait for one to end."
            raise limited(message, _RETRY_AFTER_SECONDS)
        self.rates.check(client.uid, most.tokens)
        self.ledger.reserve(client, most)
        self.rates.take(client.uid, most.tokens)
        self.running[client.uid] += 1
        return Reservation(client, most, self, prices)

    def _share(self) -> float:
        return 1 / max(self._num_gateways(), 1)

    def _limits_of(self, uid: str) -> RateLimits:
        limits = self.clients[uid].limits
        return RateLimits(limits.requests_per_minute, limits.tokens_per_minute, self._share())
