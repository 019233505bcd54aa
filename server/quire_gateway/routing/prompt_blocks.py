"""A prompt as a chain of digests, one for each KB: two prompts share as many as they have KBs in common.

The text is hashed as it is, never tokenised: roles and texts in their order. What separates caches in the
engine, the model or adapter and the salt, begins the chain. The seed is the install's own, so that clients
cannot aim at the digests of other prompts.
"""

from __future__ import annotations

from xxhash import xxh3_64

from quire_gateway.routing.router import RequestFacts

BLOCK_BYTES = 1024
_END = "\0"


def digests(facts: RequestFacts, seed: int) -> list[int]:
    """The chain. A rest that fills no block is left out, where it is not all that there is."""
    chain = xxh3_64(_bytes(f"{facts.model}{_END}{facts.cache_salt}{_END}"), seed)
    text = _bytes(_END.join(facts.prompt))
    whole = len(text) - len(text) % BLOCK_BYTES
    found = []
    view = memoryview(text)
    for start in range(0, whole or len(text), BLOCK_BYTES):
        chain.update(view[start : start + BLOCK_BYTES])
        found.append(chain.intdigest())
    return found


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
