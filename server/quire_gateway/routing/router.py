"""What every policy is: it chooses one of the candidates for a request, and learns from the answer.

Pure: the clock and chance are passed in. Policies see a request as its facts, never its body.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from quire_gateway.replica import Replica


class RequestFacts(NamedTuple):
    """What a request is routed by."""

    model: str = ""  # as the client names it
    prompt: Sequence[str] = ()  # its parts in their order; a message is its role and its text
    user: str = ""
    cache_salt: str = ""
    headers: Sequence[tuple[bytes, bytes]] = ()  # names in lower case


class Pick(NamedTuple):
    """A replica, why it was chosen, and, where the policy looks at prompts, their blocks."""

    replica: Replica
    reason: str  # a label of metrics
    digests: Sequence[int] = ()
    num_known: int = 0  # so many leading blocks are believed to be cached there


class Router(Protocol):
    """A policy of one model. Where it keeps state, that is bounded, and keyed by the pods' UIDs."""

    def pick(self, facts: RequestFacts, candidates: Sequence[Replica], now: float) -> Pick | None:
        """The choice; None without a candidate."""

    def keep(self, uids: Collection[str]) -> None:
        """These are all pods that there are; what is known of others is dropped."""

    def answered(self, choice: Pick, cached_tokens: int) -> None:
        """The replica had so many tokens of the prompt in its cache."""

    def learn(self, uid: str, digests: Sequence[int]) -> None:
        """Another gateway sent a prompt of these blocks to this pod."""


class Stateless:
    """What a policy that learns nothing does about it."""

    def keep(self, uids: Collection[str]) -> None:
        """Nothing is kept."""

    def answered(self, choice: Pick, cached_tokens: int) -> None:
        """Nothing is predicted."""

    def learn(self, uid: str, digests: Sequence[int]) -> None:
        """Nothing is shared."""
