"""What LLMClients may ask for at one gateway: requests and tokens a minute, requests at once, and a budget.

What a request may take is reserved before it is relayed, and settled with what it took when it is over. Each
gateway gives out its share of a limit, by the number of gateways that run: they need no store, and a client
whose requests all go to one of them gets that share alone. Pure but for the clock that it is given.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from quire_gateway.llm_client import Limits, LLMClient
from quire_gateway.llm_route import Prices
from quire_gateway.usage_ledger import Spending, UsageLedger, spending
from quire_http.errors import ApiError, limited
from quire_http.rate_limit import RateLimits, Rates

_RETRY_AFTER_SECONDS = 1


class Charges(Protocol):
    """Where the rates of clients, by UID, are corrected when a request is over."""

    def spend(self, client: str, num_tokens: int) -> None:
        """It took so many tokens more than it had reserved, or less."""

    def refund(self, client: str) -> None:
        """It was not served."""


class Limiter(Protocol):
    """Admits requests, by what it knows itself or by asking elsewhere."""

    async def admit(
        self, client: LLMClient, prompt_tokens: int, completion_tokens: int, prices: Prices
    ) -> Reservation:
        """Reserve a request with so many tokens. Raises a 429, which says how long to wait if that helps."""


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

    def reprice(self, prices: Prices) -> None:
        """Something of these prices is to answer. Raises a 429 where the budget has no room for them."""
        dearer = spending(self.most.prompt_tokens, self.most.completion_tokens, prices).cost - self.most.cost
        if dearer > 0:
            more = Spending(cost=dearer)
            self._limiter.ledger.check(self.client, more)
            self._limiter.ledger.hold(self.client, more)
            self.most += more
            self._limiter.charges.spend(self.client.uid, 0)  # where limits are shared, others are to see it
        self._prices = prices

    def settle(self, prompt_tokens: int, completion_tokens: int) -> None:
        """The request is over, and took this."""
        self._end(spending(prompt_tokens, completion_tokens, self._prices))

    def settle_whole(self) -> None:
        """It is over, and took as much as it could, for all that is known."""
        self.settle(self.most.prompt_tokens, self.most.completion_tokens)

    def release(self) -> None:
        """It is over, and nothing was done for it."""
        limits = self._limits()
        refunded = _rescaled(-1, self.client.limits.requests_per_minute, limits.requests_per_minute)
        if not self._is_settled and refunded:
            self._limiter.charges.refund(self.client.uid)
        self._end(Spending())

    def _end(self, spent: Spending) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        limiter, uid, charged = self._limiter, self.client.uid, self.client.limits.tokens_per_minute
        more = _rescaled(spent.tokens - self.most.tokens, charged, self._limits().tokens_per_minute)
        limiter.charges.spend(uid, more)
        limiter.ledger.settle(self.client, self.most, spent)
        limiter.running[uid] -= 1
        limiter.forget_idle(uid)

    def _limits(self) -> Limits:
        """Those of now: an edit may have changed them since the request was charged."""
        return self._limiter.clients.get(self.client.uid, self.client).limits


def _rescaled(amount: int, charged: int | None, limit: int | None) -> int:
    """What a correction is where the limit is another one than that which was charged: a bucket stays as full
    as it was when its limit changes. Nothing where either is none; rounded to what is charged more.
    """
    if charged is None or limit is None:
        return 0
    return -(-amount * limit // charged)


class ClientLimiter:
    """Admits requests by this gateway's share of their limits. ``num_gateways``: those that run now."""

    def __init__(
        self, num_gateways: Callable[[], int], ledger: UsageLedger, clock: Callable[[], float]
    ) -> None:
        self._num_gateways = num_gateways
        self.clients: dict[str, LLMClient] = {}  # of running requests, as of the last one, by UID
        self.running: Counter[str] = Counter()
        self.ledger = ledger
        self.rates = Rates(self._limits_of, clock)
        self.charges: Charges = self.rates

    async def admit(
        self, client: LLMClient, prompt_tokens: int, completion_tokens: int, prices: Prices
    ) -> Reservation:
        """As `reserve`."""
        return self.reserve(client, spending(prompt_tokens, completion_tokens, prices), prices)

    def reserve(self, client: LLMClient, most: Spending, prices: Prices) -> Reservation:
        """Reserve what a request may take. Raises a 429, which says how long to wait if that helps."""
        uid = client.uid
        self.clients[uid] = client
        try:
            self.check_concurrency(client, self._share())
            self.ledger.check(client, most)
            self.rates.charge(uid, most.tokens)
        except ApiError:
            self.forget_idle(uid)
            raise
        return self.hold(client, most, prices)

    def hold(self, client: LLMClient, most: Spending, prices: Prices) -> Reservation:
        """A request that was admitted runs."""
        self.clients[client.uid] = client
        self.ledger.hold(client, most)
        self.running[client.uid] += 1
        return Reservation(client, most, self, prices)

    def check_concurrency(self, client: LLMClient, share: float = 1.0) -> None:
        """Raise a 429 where as many of its requests run here as may."""
        at_once = client.limits.concurrent_requests
        if at_once is not None and self.running[client.uid] >= math.ceil(at_once * share):
            raise too_many_at_once(at_once)

    @contextlib.contextmanager
    def known(self, client: LLMClient) -> Iterator[None]:
        """Within it its limits are known to the rates."""
        self.clients[client.uid] = client
        try:
            yield
        finally:
            self.forget_idle(client.uid)

    def forget_idle(self, uid: str) -> None:
        """Keep nothing of a client without requests but its rates."""
        if not self.running[uid]:
            del self.running[uid]
            self.clients.pop(uid, None)

    def _share(self) -> float:
        return 1 / max(self._num_gateways(), 1)

    def _limits_of(self, uid: str) -> RateLimits:
        limits = self.clients[uid].limits
        return RateLimits(limits.requests_per_minute, limits.tokens_per_minute, self._share())


def too_many_at_once(at_once: int) -> ApiError:
    """The 429 of a request for which others of the same client have to end."""
    message = f"This client may have {at_once} requests at once, and has: wait for one to end."
    return limited(message, _RETRY_AFTER_SECONDS)
