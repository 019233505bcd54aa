"""API keys: a directory in which each file is a client (its name) and its key (its content), as the kubelet
mounts a Secret. Keys that are added or removed count within seconds.

Decided on `scope["path"]`, never on a URL put together from headers. With a directory, everything is denied
but the public paths; a directory without a key denies every request.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable
from pathlib import Path

from starlette.types import Scope

from quire_server.api.protocol.errors import ApiError

logger = logging.getLogger(__name__)

PUBLIC_PATHS = frozenset({"/health", "/metrics"})
_REREAD_SECONDS = 2.0
_MAX_KEY_BYTES = 4096


class Keys:
    """The clients and their keys."""

    def __init__(self, directory: Path | None, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._digests: dict[str, bytes] = {}
        self._read_at = float("-inf")

    @property
    def required(self) -> bool:
        """False where this server has no keys: every request is allowed."""
        return self._directory is not None

    def client_of(self, authorization: bytes) -> str | None:
        """The client whose key an Authorization header carries, or None."""
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            return None
        self._reread()
        presented = _digest(key)
        found: str | None = None
        for (
            client,
            digest,
        ) in self._digests.items():  # all of them, in constant time
            if hmac.compare_digest(digest, presented):
                found = client
        return found

    def _reread(self) -> None:
        now = self._clock()
        if self._directory is None or now - self._read_at < _REREAD_SECONDS:
            return
        self._read_at = now
        digests: dict[str, bytes] = {}
        try:
            for path in self._directory.iterdir():
                # The kubelet keeps the real files in hidden directories and links to them.
                if not path.name.startswith(".") and path.is_file():
                    key = path.read_bytes()[:_MAX_KEY_BYTES].strip()
                    if key:
                        digests[path.name] = _digest(key)
        except OSError:
            # In the middle of the kubelet's swap: what was read before holds until the next look.
            logger.warning("cannot read the API keys", exc_info=True)
            return
        self._digests = digests


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key.strip()).digest()


def require_key(keys: Keys, scope: Scope) -> None:
    """Note the client's name in the scope, or raise a 401. Two Authorization headers are refused:
    only request smuggling sends them.
    """
    if not keys.required:
        return
    headers = [value for name, value in scope["headers"] if name == b"authorization"]
    client = keys.client_of(headers[0]) if len(headers) == 1 else None
    if client is None:
        raise ApiError(
            401,
            "A valid API key is needed: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers=(("www-authenticate", "Bearer"),),
        )
    scope["quire.client"] = client
