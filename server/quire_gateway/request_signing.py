"""Signs requests for the replicas of one LLMDeployment, so that these know for whom they answer.

A token is a JWT with an Ed25519 signature: who the client is, its highest priority, whose cache it shares,
and by which name it asked for the model. It is valid for half a minute, and the same one is used for some
seconds. The private key is a file of a Secret, read again when it has changed; replicas have the public one
alone.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import orjson
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

logger = logging.getLogger(__name__)

TOKEN_HEADER = "x-quire-gateway-token"
LIFETIME_SECONDS = 30
#: The most urgent priority of a client without an own one, in the engine's numbers.
NORMAL_PRIORITY = 0
LOWEST_PRIORITY = 100
_REREAD_SECONDS = 10.0
_REUSED_SECONDS = 5  # a token: to sign one for each request is a twentieth of what a relayed one costs


class SigningKeyError(Exception):
    """The file has no key to sign with."""


class Identity(NamedTuple):
    """For whom a request is. Clients are one until they have keys of their own."""

    client: str = ""
    highest_priority: int = NORMAL_PRIORITY
    cache_scope: str = ""


class RequestSigner:
    """Signs with the key of a file. Raises SigningKeyError where there is none at the beginning."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._clock = clock
        self._monotonic = monotonic
        self._content = _read(path)
        self._key, self._header = _parsed(self._content)
        self._read_at = monotonic()
        self._tokens: dict[tuple[str, Identity, str], str] = {}
        self._tokens_since = 0

    def token(self, audience: str, identity: Identity, model: str) -> str:
        """For NAMESPACE/NAME of an LLMDeployment; ``model``: the name that the client asked for."""
        self._reread()
        now = int(self._clock())
        if not 0 <= now - self._tokens_since < _REUSED_SECONDS:
            self._tokens, self._tokens_since = {}, now
        for_whom = audience, identity, model
        if (token := self._tokens.get(for_whom)) is None:
            claims = {
                "aud": audience,
                "client": identity.client,
                "priority": identity.highest_priority,
                "cache": identity.cache_scope,
                "model": model,
            }
            token = self._tokens[for_whom] = self.signed(claims, LIFETIME_SECONDS)
        return token

    def signed(self, claims: Mapping[str, object], seconds: int) -> str:
        """A token that says this, and is valid so long from now on."""
        self._reread()
        now = int(self._clock())
        text = self._header + b"." + _encoded(orjson.dumps({**claims, "iat": now, "exp": now + seconds}))
        return (text + b"." + _encoded(self._key.sign(text))).decode("ascii")

    def _reread(self) -> None:
        now = self._monotonic()
        if now - self._read_at < _REREAD_SECONDS:
            return
        self._read_at = now
        try:
            if (content := _read(self._path)) != self._content:
                self._key, self._header = _parsed(content)
                self._content = content
                self._tokens = {}
                logger.info("requests are signed with another key")
        except SigningKeyError as error:
            logger.error("the key from before is used on: %s", error)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SigningKeyError(f"{path} cannot be read: {error}") from None


def _parsed(content: bytes) -> tuple[Ed25519PrivateKey, bytes]:
    """The key, and the first part of its tokens."""
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError):
        raise SigningKeyError("the signing key is no private key in PEM") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningKeyError("the signing key is no Ed25519 key")
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    header: Mapping[str, str] = {"alg": "EdDSA", "kid": hashlib.sha256(raw).hexdigest()[:16], "typ": "JWT"}
    return key, _encoded(orjson.dumps(header))


def _encoded(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
