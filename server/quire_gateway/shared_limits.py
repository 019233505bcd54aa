"""The limits of LLMClients, exactly over all gateways: the limit store decides, or else this gateway.

Requests that come while an exchange runs wait for the next one, which has all of them: a flood costs the
store little. What it has just refused is refused here. While it is away each gateway gives out its share, of
what was left when the store was last heard of, or refuses; the store is asked for again in the background, so
that no request waits for it. What a gateway holds is said anew every few seconds, so that a store that has
lost its data learns it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quire_gateway.client_limits import ClientLimiter, Reservation, too_many_at_once
from quire_gateway.limit_script import LEASE_SECONDS, Answer, Held, Question, answer, arguments, key
from quire_gateway.limit_store_url import LimitStoreEmptyError, LimitStoreError
from quire_gateway.llm_client import NO_BUDGET, NO_LIMITS, LLMClient
from quire_gateway.llm_route import Prices
from quire_gateway.metrics import Metrics
from quire_gateway.usage_ledger import Spending, insufficient, spending
from quire_http.errors import ApiError, overloaded

if TYPE_CHECKING:
    from quire_gateway.limit_store import LimitStore

logger = logging.getLogger(__name__)

_SAY_SECONDS = LEASE_SECONDS / 3
_REMEMBER_SECONDS = 0.1  # a refusal; what others give back is seen after that
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0
_MOST_AT_ONCE = 256  # requests of one client
_RETRY_AFTER_SECONDS = 1


class Changed(Protocol):
    """Called when the store is lost, and when it answers."""

    def __call__(self, *, is_up: bool) -> None:
        """Returns at once."""


@dataclass(slots=True)
class _Waiting:
    """A request that is not decided yet."""

    client: LLMClient
    most: Spending
    prices: Prices
    decision: asyncio.Future[Reservation]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What the store has refused to a client with these limits, by which of them, and what was asked for."""

    client: LLMClient
    kind: str
    most: Spending
    until: float  # then the store is asked again

    def holds(self, client: LLMClient, most: Spending, now: float) -> bool:
        """Whether the store would refuse this now. After an edit of the limits it may not."""
        if now >= self.until or (client.limits, client.budget) != (self.client.limits, self.client.budget):
            return False
        if self.kind == "budget":
            return most.tokens >= self.most.tokens and most.cost >= self.most.cost
        return self.kind != "tokens" or most.tokens >= self.most.tokens


@dataclass(slots=True)
class _Known:
    """What is remembered of one client."""

    client: LLMClient
    returned: tuple[int, int] = (0, 0)  # to the store, requests and tokens
    is_new: bool = True  # to the store of now
    holds: bool = False  # by what was last said
    refusal: _Refusal | None = None  # the last one


class SharedLimiter:
    """That of one gateway, by its name. ``denies``: while the store is away, and gives out no share."""

    def __init__(
        self,
        local: ClientLimiter,
        store: LimitStore,
        metrics: Metrics,
        gateway: str,
        *,
        denies: bool = False,
        changed: Changed = lambda *, is_up: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = local
        self._store = store
        self._metrics = metrics
        self._gateway = gateway
        self._denies = denies
        self._changed = changed
        self._clock = clock
        self._is_up: bool | None = None  # None: not asked yet
        self._waiting: list[_Waiting] = []
        self._known: dict[str, _Known] = {}  # by UID
        self._dirty: set[str] = set()
        self._wake = asyncio.Event()
        self._said_at = float("-inf")
        local.charges = self
        metrics.limit_store(is_up=False)

    async def admit(
        self, client: LLMClient, prompt_tokens: int, completion_tokens: int, prices: Prices
    ) -> Reservation:
        """Reserve a request. Raises a 429, or a 503 where nothing is given out without the store."""
        most = spending(prompt_tokens, completion_tokens, prices)
        if client.limits == NO_LIMITS and client.budget == NO_BUDGET:
            return self._local.reserve(client, most, prices)
        if not self._is_up:
            return self._without(client, most, prices)
        self._local.check_concurrency(client)
        self._local.ledger.check(client, most)
        self._recall(client, most)
        one = _Waiting(client, most, prices, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self._wake.set()
        try:
            return await one.decision
        except LimitStoreError:
            return self._without(client, most, prices)
        except asyncio.CancelledError:
            if one.decision.done() and not one.decision.cancelled() and one.decision.exception() is None:
                one.decision.result().release()
            raise

    def spend(self, client: str, num_tokens: int) -> None:
        """A request took so many tokens more than it had reserved, or less."""
        if self._is_up:
            self._give_back(client, 0, -num_tokens)
        else:
            self._local.rates.spend(client, num_tokens)

    def refund(self, client: str) -> None:
        """A request was not served."""
        if self._is_up:
            self._give_back(client, 1, 0)
        else:
            self._local.rates.refund(client)

    async def run(self) -> None:
        """Exchange with the store until cancelled."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._exchange()
                pause = _FIRST_PAUSE_SECONDS
            except Exception as error:
                if not isinstance(error, LimitStoreError):  # a gateway goes on without its store
                    logger.exception("the exchange with the limit store failed")
                    error = LimitStoreError("error", type(error).__name__)
                self._lost(error)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # gateways do not ask all at once
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            if not self._waiting and not self._dirty:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _SAY_SECONDS)

    async def close(self) -> None:
        """This gateway ends: what it still holds is said once more."""
        if self._is_up:
            with contextlib.suppress(LimitStoreError):
                await self._exchange()
        await self._store.close()

    def _without(self, client: LLMClient, most: Spending, prices: Prices) -> Reservation:
        if self._denies:
            message = "Limits cannot be kept now: the limit store does not answer. Ask again."
            raise overloaded("limit_store_unavailable", message, _RETRY_AFTER_SECONDS)
        return self._local.reserve(client, most, prices)

    def _recall(self, client: LLMClient, most: Spending) -> None:
        """Raise what the store has answered a moment ago, where it would still."""
        known = self._known.get(client.uid)
        refusal = None if known is None else known.refusal
        if refusal is not None and refusal.holds(client, most, self._clock()):
            with self._local.known(client):
                raise self._refusal(client, refusal.kind, most)

    def _refusal(self, client: LLMClient, kind: str, most: Spending) -> ApiError:
        if kind == "concurrency":
            return too_many_at_once(client.limits.concurrent_requests or 0)
        if kind == "budget":
            return insufficient(client.budget)
        return self._local.rates.refusal(client.uid, kind, most.tokens if kind == "tokens" else 1)

    def _give_back(self, uid: str, requests: int, tokens: int) -> None:
        if (known := self._known.get(uid)) is None:
            known = self._known[uid] = _Known(self._local.clients[uid])
        known.returned = known.returned[0] + requests, known.returned[1] + tokens
        known.refusal = None
        self._dirty.add(uid)
        self._wake.set()

    async def _exchange(self) -> None:
        """Ask for all that waits, and say what has changed. Raises LimitStoreError."""
        waiting = self._next()
        try:
            try:
                await self._exchange_for(waiting)
            except LimitStoreEmptyError:
                logger.info("the limit store has lost its data: this gateway sends what it holds again")
                self._send_all_again()
                await self._exchange_for(waiting)
        except BaseException as error:  # also where this gateway ends meanwhile
            for one in (one for several in waiting.values() for one in several):
                if not one.decision.done():
                    one.decision.set_exception(LimitStoreError(getattr(error, "reason", "cancelled")))
            raise

    async def _exchange_for(self, waiting: dict[str, list[_Waiting]]) -> None:
        now = self._clock()
        uids = {*waiting, *self._dirty}
        if now - self._said_at >= _SAY_SECONDS or not self._is_up:
            self._said_at = now
            uids |= {uid for uid, one in self._known.items() if one.holds} | {*self._local.running}
            self._forget(uids)
        questions = [self._question(uid, waiting.get(uid, [])) for uid in uids]
        self._dirty = set()
        try:
            calls = [(key(one.client), arguments(one, self._gateway)) for one in questions]
            replies = await self._store.run_script(calls)
            answers = [_read(reply, one) for reply, one in zip(replies, questions, strict=True)]
        except BaseException:
            self._dirty |= uids
            raise
        self._found()
        for question, its_answer in zip(questions, answers, strict=True):
            self._take(question, its_answer, waiting.get(question.client.uid, []))

    def _next(self) -> dict[str, list[_Waiting]]:
        """Those of each client, not too many; the others stay."""
        chosen: dict[str, list[_Waiting]] = {}
        rest: list[_Waiting] = []
        for one in self._waiting:
            several = chosen.setdefault(one.client.uid, [])
            (several if len(several) < _MOST_AT_ONCE else rest).append(one)
        self._waiting = rest
        return chosen

    def _question(self, uid: str, waiting: list[_Waiting]) -> Question:
        local, client = self._local, waiting[-1].client if waiting else None
        known = self._known.get(uid)
        if known is None:
            known = self._known[uid] = _Known(client or local.clients[uid])
        known.client = client or local.clients.get(uid) or known.client
        client = known.client
        unseen, just_saved = local.ledger.unseen(client)
        with local.known(client):
            believed = local.rates.levels(uid) if known.is_new else None
        return Question(
            client,
            local.ledger.stored(client) - just_saved,
            Held(local.running.get(uid, 0), unseen.tokens, unseen.cost),
            [one.most for one in waiting],
            known.returned,
            believed,
        )

    def _take(self, question: Question, answered: Answer, waiting: list[_Waiting]) -> None:
        """What the store says about one client."""
        client, local = question.client, self._local
        known = self._known[client.uid]
        known.is_new = False
        known.holds = question.held != Held() or "ok" in answered.verdicts
        known.returned = (
            known.returned[0] - question.returned[0],
            known.returned[1] - question.returned[1],
        )
        cancelled = []
        with local.known(client):
            local.rates.set_levels(client.uid, answered.levels)
            for one, verdict in zip(waiting, answered.verdicts, strict=True):
                if verdict == "ok":
                    reservation = local.hold(client, one.most, one.prices)
                    if one.decision.done():
                        cancelled.append(reservation)
                    else:
                        one.decision.set_result(reservation)
                    continue
                known.refusal = _Refusal(client, verdict, one.most, self._clock() + _REMEMBER_SECONDS)
                if not one.decision.done():
                    one.decision.set_exception(self._refusal(client, verdict, one.most))
        for reservation in cancelled:
            reservation.release()

    def _forget(self, needed: Collection[str]) -> None:
        """Keep nothing of clients that hold nothing, once their rates are what they are for a new one."""
        for uid, one in list(self._known.items()):
            if self._is_up and uid not in needed and not one.holds:
                with self._local.known(one.client):
                    limits, levels = one.client.limits, self._local.rates.levels(uid)
                whole = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
                if all(level >= (whole[kind] or 0) for kind, level in levels.items()):
                    del self._known[uid]

    def _found(self) -> None:
        if not self._is_up:
            logger.info("the limit store answers: limits are exact")
            self._is_up = True
            self._metrics.limit_store(is_up=True)
            self._changed(is_up=True)

    def _lost(self, error: LimitStoreError) -> None:
        self._metrics.limit_store_failed(error.reason)
        if self._is_up is not False:
            then = "limited clients are refused" if self._denies else "limits are shares of this gateway"
            logger.warning("the limit store does not answer (%s: %s): %s", error.reason, error, then)
            self._is_up = False
            self._metrics.limit_store(is_up=False)
            self._changed(is_up=False)
            self._metrics.limit_store_lost()
            self._send_all_again()
            for waiting in self._waiting:
                if not waiting.decision.done():
                    waiting.decision.set_exception(LimitStoreError(error.reason))
            self._waiting = []

    def _send_all_again(self) -> None:
        """The store has none of what was sent to it: the next exchange sends all of it."""
        self._said_at = float("-inf")
        for one in self._known.values():
            one.is_new = True


def _read(reply: Any, question: Question) -> Answer:
    """The answer to a question. Raises LimitStoreError where it is none of the script's."""
    try:
        found = answer(reply)
        if len(found.verdicts) != len(question.requests):
            raise ValueError
    except (ValueError, TypeError, AttributeError):
        raise LimitStoreError("error", "its reply cannot be read") from None
    return found
