"""What is asked of the limit store, and what it answers: the arguments and the reply of ``limit_script.lua``.

The store decides by its own clock, so that those of gateways may differ. Pure: knows no connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from importlib.resources import files
from typing import Any

from quire_gateway.llm_client import LLMClient
from quire_gateway.usage_ledger import Spending

SCRIPT = files("quire_gateway").joinpath("limit_script.lua").read_text(encoding="utf-8")
LEASE_SECONDS = 10.0  # what a gateway holds comes back so long after its last word
KINDS = ("requests", "tokens")
_MICROSECONDS = 1_000_000
_COST_UNIT = Decimal(10) ** 12  # of a currency: prices a million tokens have up to six digits
_NONE = -1


@dataclass(frozen=True, slots=True)
class Held:
    """What the requests of a client hold at one gateway, or used there and no other one can see yet."""

    running: int = 0
    tokens: int = 0
    cost: Decimal = Decimal(0)


@dataclass(frozen=True, slots=True)
class Question:
    """Requests of one client, with what this gateway holds of it without them. No request: only that."""

    client: LLMClient
    saved: Spending  # in its period, by its status
    held: Held
    requests: Sequence[Spending] = ()
    returned: tuple[int, int] = (0, 0)  # requests and tokens that were charged and not taken
    believed: Mapping[str, float] | None = None  # at most so much is left; None: the store knows better


@dataclass(frozen=True, slots=True)
class Answer:
    """``verdicts``: "ok" for each request that is admitted, else which limit has no room for it."""

    levels: Mapping[str, float]
    verdicts: tuple[str, ...]


def key(client: LLMClient) -> str:
    """The one key of a client."""
    return f"quire:client:{client.uid}"


def arguments(question: Question, gateway: str) -> list[str | int]:
    """In the order in which the script reads them."""
    limits, budget = question.client.limits, question.client.budget
    believed = question.believed or {}
    whole = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
    found: list[str | int] = [
        gateway,
        int(LEASE_SECONDS * _MICROSECONDS),
        *(_number(whole[kind]) for kind in KINDS),
        _number(limits.concurrent_requests),
        _number(budget.tokens),
        _NONE if budget.cost is None else _cost(budget.cost),
        question.saved.tokens,
        _cost(question.saved.cost),
        question.held.running,
        question.held.tokens,
        _cost(question.held.cost),
        *question.returned,
        int(question.believed is not None),
        *(f"{believed.get(kind, whole[kind] or 0):.6f}" for kind in KINDS),
    ]
    for one in question.requests:
        found += (one.tokens, _cost(one.cost))
    return found


def answer(reply: Any) -> Answer:
    """What the script returned."""
    *levels, verdicts = reply
    left = {kind: float(text) for kind, text in zip(KINDS, levels, strict=True) if text}
    return Answer(left, tuple(verdict.decode() for verdict in verdicts))


def _number(limit: int | None) -> int:
    return _NONE if limit is None else limit


def _cost(cost: Decimal) -> int:
    return int((cost * _COST_UNIT).to_integral_value(ROUND_CEILING))
