"""Tokens that one of our programs signs and another one checks: JWTs with an Ed25519 signature.

The public keys are files of a directory, as the kubelet mounts a ConfigMap; several at once, so that they can
be exchanged. Entries that are added, changed or removed count within seconds. What the claims mean is the
reader's. The algorithm is fixed here: what a token says of itself chooses nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

logger = logging.getLogger(__name__)

ALGORITHM = "EdDSA"
#: By which the clocks of two nodes may differ.
CLOCK_SKEW_SECONDS = 10
_MAX_TOKEN_BYTES = 2048
_REREAD_SECONDS = 2.0


class TokenError(Exception):
    """Why a token is not accepted."""


class TrustedKeys:
    """The public keys in a directory."""

    def __init__(self, directory: Path, monotonic: Callable[[], float]) -> None:
        self._directory = directory
        self._monotonic = monotonic
        self._keys: dict[str, Ed25519PublicKey] = {}  # by their ids
        self._problems: dict[str, str] = {}
        self._read_at = float("-inf")

    def claims(self, token: bytes, audience: str, now: float, longest: float) -> Mapping[str, Any]:
        """What a token for this audience says, once its signature and its time are known to be right.
        ``longest``: seconds for which it may be valid. Raises TokenError.
        """
        claims = self._verified(token)
        issued, expires = claims.get("iat"), claims.get("exp")
        if type(issued) is not int or type(expires) is not int:
            raise TokenError("it does not say how long it is valid")
        if not 0 < expires - issued <= longest:
            raise TokenError(f"it is valid for more than {longest:g} s")
        if now >= expires + CLOCK_SKEW_SECONDS:
            raise TokenError("it has expired")
        if now < issued - CLOCK_SKEW_SECONDS:
            raise TokenError("it is of the future: compare the clocks of the nodes")
        if claims.get("aud") != audience:
            raise TokenError("it is for another audience")
        return claims

    def _verified(self, token: bytes) -> Mapping[str, Any]:
        """The claims, once their signature is known to be right."""
        parts = token.split(b".")
        if len(token) > _MAX_TOKEN_BYTES or len(parts) != 3:
            raise TokenError("it is no token")
        header = _object(parts[0])
        if header.get("alg") != ALGORITHM:
            raise TokenError(f"its algorithm is not {ALGORITHM}")
        self._reread()
        key = self._keys.get(str(header.get("kid")))
        if key is None:
            raise TokenError("its key is none of this server's")
        try:
            key.verify(_decoded(parts[2]), parts[0] + b"." + parts[1])
        except InvalidSignature:
            raise TokenError("its signature is wrong") from None
        return _object(parts[1])

    def _reread(self) -> None:
        now = self._monotonic()
        if now - self._read_at < _REREAD_SECONDS:
            return
        self._read_at = now
        try:
            # The kubelet keeps the real files in hidden directories and links to them.
            paths = [path for path in sorted(self._directory.iterdir()) if not path.name.startswith(".")]
            contents = {path.name: path.read_bytes() for path in paths if path.is_file()}
        except OSError:
            # In the middle of the kubelet's swap: what was read before holds until the next look.
            logger.warning("cannot read the gateway's keys", exc_info=True)
            return
        keys: dict[str, Ed25519PublicKey] = {}
        problems: dict[str, str] = {}
        for name, content in contents.items():
            try:
                key = _public_key(content)
            except ValueError as error:
                problems[name] = str(error)
                continue
            keys[key_id(key)] = key
        for name, why in problems.items() - self._problems.items():
            logger.error("this is no key of a gateway", extra={"entry": name, "why": why})
        self._keys, self._problems = keys, problems


def key_id(key: Ed25519PublicKey) -> str:
    """How tokens name a key."""
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:16]


def _public_key(content: bytes) -> Ed25519PublicKey:
    """Of a public key, or of a certificate, of which nothing else counts. Raises ValueError."""
    is_certificate = b"BEGIN CERTIFICATE" in content
    key = (
        x509.load_pem_x509_certificate(content).public_key()
        if is_certificate
        else serialization.load_pem_public_key(content)
    )
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("it is no Ed25519 key")
    return key


def _object(part: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(_decoded(part))
    except (ValueError, RecursionError):
        raise TokenError("it is no token") from None
    if not isinstance(value, dict):
        raise TokenError("it is no token")
    return value


def _decoded(part: bytes) -> bytes:
    try:
        return base64.b64decode(part + b"=" * (-len(part) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise TokenError("it is no token") from None
