"""The key that a request carries: as OpenAI's clients send it, or as Anthropic's do.

A header that is sent twice, and two headers that do not have the same key, are no key: only request smuggling
sends them.
"""

from __future__ import annotations

from collections.abc import Iterable


def key_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key in `Authorization: Bearer KEY` or in `x-api-key: KEY`; empty where there is none."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in (b"authorization", b"x-api-key"):
            if name in found:
                return b""
            found[name] = _bearer(value) if name == b"authorization" else value.strip()
    return found.popitem()[1] if len(set(found.values())) == 1 else b""


def _bearer(authorization: bytes) -> bytes:
    """The key of an Authorization header, empty where it is of another scheme."""
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
