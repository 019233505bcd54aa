"""An LLMClient as the gateway reads it: whose key a request carries, and which models that key is for.

Keys are random, so their digests are no secrets, and looking a digest up in a table says nothing about a key:
one who measures the time cannot choose the digest of what is sent. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from quire_gateway.llm_route import ObjectError

PERIODS = ("Day", "Month")
_LONGEST_KEY = 512  # bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may ask for, at all gateways together. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers
    concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """What a client may use in a period, at all gateways together. None: no budget."""

    period: str = "Month"  # or "Day", in UTC
    tokens: int | None = None  # of prompts and answers
    cost: Decimal | None = None  # in the currency of the routes' prices


NO_LIMITS = Limits()
NO_BUDGET = Budget()


@dataclass(frozen=True, slots=True)
class LLMClient:
    """One client."""

    namespace: str
    name: str
    uid: str
    created: str
    key_hashes: tuple[str, ...]
    allowed_models: frozenset[str] = frozenset()  # empty: all
    suspended: bool = False
    limits: Limits = NO_LIMITS
    budget: Budget = NO_BUDGET

    @property
    def full_name(self) -> str:
        """Unique among the clients of a gateway, for metrics and the access log."""
        return f"{self.namespace}/{self.name}"

    def may_ask(self, model: str) -> bool:
        """Whether its keys are for this model."""
        return not self.allowed_models or model in self.allowed_models


def parse(body: Mapping[str, Any]) -> LLMClient:
    """The client of an object. Raises ObjectError."""
    try:
        metadata, spec = body["metadata"], body["spec"]
        return LLMClient(
            namespace=str(metadata["namespace"]),
            name=str(metadata["name"]),
            uid=str(metadata["uid"]),
            created=str(metadata["creationTimestamp"]),
            key_hashes=tuple(map(str, spec["keyHashes"])),
            allowed_models=frozenset(map(str, spec.get("allowedModels") or ())),
            suspended=spec.get("suspended", False) is True,
            limits=_limits(spec.get("limits") or {}),
            budget=_budget(spec.get("budget") or {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError, InvalidOperation) as error:
        raise ObjectError(f"the spec cannot be read: {error!r}") from None


def _limits(body: Mapping[str, Any]) -> Limits:
    names = ("requestsPerMinute", "tokensPerMinute", "concurrentRequests")
    found = [None if body.get(name) is None else int(body[name]) for name in names]
    if any(one is not None and one < 1 for one in found):
        raise ValueError(f"limits are {body!r}")
    return Limits(*found)


def _budget(body: Mapping[str, Any]) -> Budget:
    tokens, cost, period = body.get("tokens"), body.get("cost"), body.get("period", NO_BUDGET.period)
    if period not in PERIODS:
        raise ValueError(f"budget.period is {period!r}")
    found = Budget(period, None if tokens is None else int(tokens), None if cost is None else Decimal(cost))
    if found.cost is not None and not found.cost.is_finite():
        raise ValueError(f"budget.cost is {cost!r}")
    return found


def key_hash(authorization: bytes) -> str:
    """The digest of the key in an Authorization header, "" where it has none."""
    scheme, _, key = authorization.partition(b" ")
    key = key.strip()
    if scheme.lower() != b"bearer" or not 0 < len(key) <= _LONGEST_KEY:
        return ""
    return hashlib.sha256(key).hexdigest()
