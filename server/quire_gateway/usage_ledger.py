"""What each client has used in its period, and whether its budget has room: saved, not saved yet, reserved.

The saved part is in the status of the LLMClient, so that it outlives the gateways and is the same for all.
What this gateway has counted since is added to it; what the others have is not known until they save theirs.
Pure but for the clock that it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from quire_gateway.llm_client import NO_BUDGET, Budget, LLMClient
from quire_gateway.llm_route import Prices
from quire_http.errors import ApiError

_MILLION = 1_000_000
_FREE = Prices()
_SEEN_SECONDS = 2.0  # by then the watch has brought a saved status to every gateway
_FORMATS = {"Day": "%Y-%m-%d", "Month": "%Y-%m"}

Body = Mapping[str, Any]
Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Spending:
    """What requests took. ``cost`` in the currency of the prices."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: Decimal = Decimal(0)

    def __add__(self, other: Spending) -> Spending:
        return Spending(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cost + other.cost,
        )

    def __sub__(self, other: Spending) -> Spending:
        return Spending(
            self.requests - other.requests,
            self.prompt_tokens - other.prompt_tokens,
            self.completion_tokens - other.completion_tokens,
            self.cost - other.cost,
        )

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return self.prompt_tokens + self.completion_tokens


NOTHING = Spending()


def spending(prompt_tokens: int, completion_tokens: int, prices: Prices) -> Spending:
    """Of one request."""
    if prices == _FREE:
        return Spending(1, prompt_tokens, completion_tokens)
    cost = prompt_tokens * prices.prompt_per_million + completion_tokens * prices.completion_per_million
    return Spending(1, prompt_tokens, completion_tokens, cost / _MILLION)


def period_of(budget: Budget, now: float) -> str:
    """The period that a time is in, in UTC. ``now``: seconds since 1970."""
    return time.strftime(_FORMATS[budget.period], time.gmtime(now))


def saved(body: Body | None, period: str) -> Spending:
    """What the status of an LLMClient says of a period."""
    usage = _usage(body)
    if usage.get("period") != period:
        return Spending()
    try:
        cost = Decimal(usage.get("cost", "0"))
        tokens = int(usage.get("promptTokens", 0)), int(usage.get("completionTokens", 0))
        return Spending(int(usage.get("requests", 0)), *tokens, cost if cost.is_finite() else Decimal(0))
    except (TypeError, ValueError, InvalidOperation):
        return Spending()


def _usage(body: Body | None) -> Body:
    usage = ((body or {}).get("status") or {}).get("usage")
    return usage if isinstance(usage, dict) else {}


def _is_over(period: str, body: Body) -> bool:
    """Whether the status of an LLMClient says nothing of this period any more: it is of a later one, or the
    budget has another kind of period now.
    """
    kind = _kind_of_period(body, "")
    length = len(period_of(Budget(kind), 0)) if kind else len(period)
    written = str(_usage(body).get("period", ""))
    return len(period) != length or (len(written) == length and written > period)


def _kind_of_period(body: Body, unknown: str) -> str:
    """That of the budget of an LLMClient as it is stored. ``unknown``: where it is none of ours."""
    kind = (body["spec"].get("budget") or {}).get("period", NO_BUDGET.period)
    return kind if kind in _FORMATS else unknown


def document(period: str, spent: Spending) -> dict[str, Any]:
    """The same for the status."""
    return {
        "period": period,
        "requests": spent.requests,
        "promptTokens": spent.prompt_tokens,
        "completionTokens": spent.completion_tokens,
        "totalTokens": spent.tokens,
        "cost": f"{spent.cost:f}",
    }


def is_spent(budget: Budget, spent: Spending) -> bool:
    """Whether nothing is left."""
    return (budget.tokens is not None and spent.tokens >= budget.tokens) or (
        budget.cost is not None and spent.cost >= budget.cost
    )


@dataclass(frozen=True, slots=True)
class Unsaved:
    """What one client has used and its status does not say yet."""

    client: LLMClient
    period: str
    spent: Spending


class UsageLedger:
    """That of one gateway. ``stored``: an LLMClient as the API server has it; ``now``: seconds since 1970."""

    def __init__(self, stored: Callable[[Place], Body | None], now: Callable[[], float]) -> None:
        self._stored = stored
        self._now = now
        self._unsaved: dict[tuple[str, str], Unsaved] = {}  # by UID and period
        self._reserved: dict[str, Spending] = {}  # by UID
        self._just_saved: list[tuple[float, Unsaved]] = []

    def check(self, client: LLMClient, most: Spending) -> None:
        """Raise a 429 where the budget has no room for what a request may take."""
        budget = client.budget
        if budget != NO_BUDGET:
            after = self.spent(client) + self._reserved.get(client.uid, NOTHING) + most
            if exceeds(budget, after):
                raise insufficient(budget)

    def reserve(self, client: LLMClient, most: Spending) -> None:
        """Check and hold."""
        self.check(client, most)
        self.hold(client, most)

    def hold(self, client: LLMClient, most: Spending) -> None:
        """Reserve what a request may take, until it is settled."""
        reserved = self._reserved.get(client.uid)
        self._reserved[client.uid] = most if reserved is None else reserved + most

    def settle(self, client: LLMClient, most: Spending, spent: Spending) -> None:
        """The request that had reserved ``most`` is over."""
        left = self._reserved[client.uid] - most
        if left.requests:
            self._reserved[client.uid] = left
        else:
            del self._reserved[client.uid]
        if spent != NOTHING:
            body = self._body(client)  # the kind of period may be another one than when it began
            budget = client.budget
            if body is not None and (kind := _kind_of_period(body, budget.period)) != budget.period:
                budget = Budget(kind)
            period = period_of(budget, self._now())
            before = self._unsaved.get((client.uid, period))
            self._unsaved[client.uid, period] = Unsaved(
                client, period, spent if before is None else before.spent + spent
            )

    def spent(self, client: LLMClient) -> Spending:
        """In the period of now."""
        period = period_of(client.budget, self._now())
        unsaved = self._unsaved.get((client.uid, period))
        known = self.stored(client)
        return known if unsaved is None else known + unsaved.spent

    def unseen(self, client: LLMClient) -> tuple[Spending, Spending]:
        """What other gateways may not have read in the status: all, and the part that is there by now."""
        now, uid = self._now(), client.uid
        period = period_of(client.budget, now)
        just_saved = Spending()
        for at, one in self._just_saved:
            if (one.client.uid, one.period) == (uid, period) and abs(now - at) < _SEEN_SECONDS:
                just_saved += one.spent
        unsaved = self._unsaved.get((uid, period))
        known = Spending() if unsaved is None else unsaved.spent
        return known + self._reserved.get(uid, Spending()) + just_saved, just_saved

    def stored(self, client: LLMClient) -> Spending:
        """What the status says of the period of now."""
        return saved(self._body(client), period_of(client.budget, self._now()))

    def unsaved(self) -> Iterator[tuple[Unsaved, Body]]:
        """What is to be saved, each with its object as it is stored at its turn. What is of a period that is
        over, or of a deleted object, is dropped.
        """
        for key, one in list(self._unsaved.items()):
            body = self._body(one.client)
            if body is None or _is_over(one.period, body):
                del self._unsaved[key]
            else:
                yield one, body

    def saved(self, one: Unsaved) -> None:
        """It is in the status now."""
        key = (one.client.uid, one.period)
        now = self._now()
        recent = [other for other in self._just_saved if abs(now - other[0]) < _SEEN_SECONDS]
        self._just_saved = [*recent, (now, one)]
        left = self._unsaved[key].spent - one.spent
        if left == NOTHING:
            del self._unsaved[key]
        else:
            self._unsaved[key] = Unsaved(one.client, one.period, left)

    def _body(self, client: LLMClient) -> Body | None:
        body = self._stored((client.namespace, client.name))
        return body if body is not None and body["metadata"].get("uid") == client.uid else None


def exceeds(budget: Budget, spent: Spending) -> bool:
    """Whether this is more than the budget."""
    return (budget.tokens is not None and spent.tokens > budget.tokens) or (
        budget.cost is not None and spent.cost > budget.cost
    )


def insufficient(budget: Budget) -> ApiError:
    """The 429 of a request that the budget has no room for."""
    limits = [] if budget.tokens is None else [f"{budget.tokens} tokens"]
    limits += [] if budget.cost is None else [f"{budget.cost:f}"]
    message = (
        f"The budget of this client, {' and '.join(limits)} a {budget.period.lower()} in UTC, has no room "
        "for this request. A shorter one, or a smaller max_tokens, may fit."
    )
    no_retry = (("x-should-retry", "false"),)
    return ApiError(429, message, kind="insufficient_quota", code="insufficient_quota", headers=no_retry)
