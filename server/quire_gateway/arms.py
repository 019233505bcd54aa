"""Divides conversations among targets by weight, so that each stays with its target: weighted rendezvous.

Every gateway computes the same from the same objects, without state. When a weight changes, conversations
move only to the target whose share grows, or away from the one whose share shrinks. Pure.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

from quire_gateway.llm_route import Target

_RANGE = float(1 << 64)


def choose(targets: Sequence[Target], key: bytes) -> Target | None:
    """The target of a conversation; None where none has a weight."""
    weighted = [one for one in targets if one.weight > 0]
    if len(weighted) < 2:
        return weighted[0] if weighted else None
    return max(weighted, key=lambda target: _score(target, key))


def conversation_key(*parts: str | Iterable[str]) -> bytes:
    """One key of several texts; two lists of texts have one key only where they are equal."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        for text in (part,) if isinstance(part, str) else part:
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(b"%d:" % len(encoded))
            digest.update(encoded)
    return digest.digest()


def _score(target: Target, key: bytes) -> float:
    digest = hashlib.blake2b(target.key.encode(), key=key, digest_size=8).digest()
    uniform = (int.from_bytes(digest) + 0.5) / _RANGE  # above 0 and below 1, or 1 by rounding
    return -target.weight / math.log(min(uniform, math.nextafter(1.0, 0.0)))
