"""Requests that a gateway has signed: whose they are, their highest priority, and whose cache they share.

A token is a JWT with an Ed25519 signature, made for one LLMDeployment and for less than a minute. The public
keys are files of a directory, as the kubelet mounts a ConfigMap; several at once, so that they can be
exchanged. Entries that are added, changed or removed count within seconds. With a directory and no API keys
only signed requests are served; a directory without a key denies every request.

A token that was seen on its way can be used again until it expires: it has no nonce, because replicas share
no memory. NetworkPolicies keep others off that way, and nothing else than requests to the same model is won.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from starlette.types import Scope

from quire_http.errors import ApiError
from quire_server.api.auth import Keys, Principal, admit, require_key
from quire_server.core.policy import MAX_PRIORITY, MIN_PRIORITY

logger = logging.getLogger(__name__)

TOKEN_HEADER = b"x-quire-gateway-token"
MAX_LIFETIME_SECONDS = 60
#: By which the clocks of two nodes may differ.
CLOCK_SKEW_SECONDS = 10
_ALGORITHM = "EdDSA"  # what a token says of itself chooses nothing
_MAX_TOKEN_BYTES = 2048
_REREAD_SECONDS = 2.0
_NAME = re.compile(r"[^\x00-\x1f\x7f]{0,253}")


class _TokenError(Exception):
    """Why a token is not accepted."""


class GatewayKeys:
    """The keys of the gateways that are trusted. ``audience``: NAMESPACE/NAME of the LLMDeployment."""

    def __init__(
        self,
        directory: Path | None,
        audience: str,
        monotonic: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._audience = audience
        self._monotonic = monotonic
        self._clock = clock  # of the wall
        self._keys: dict[str, Ed25519PublicKey] = {}  # by their ids
        self._problems: dict[str, str] = {}
        self._read_at = float("-inf")

    @classmethod
    def none(cls) -> GatewayKeys:
        """No gateway is trusted."""
        return cls(None, "", time.monotonic, time.time)

    @property
    def required(self) -> bool:
        """False where this server trusts no gateway: tokens mean nothing then."""
        return self._directory is not None

    def principal_of(self, scope: Scope) -> Principal | None:
        """Who a signed request is for; None where it is not signed. Raises a 401."""
        if self._directory is None:
            return None
        tokens = [value for name, value in scope["headers"] if name == TOKEN_HEADER]
        if not tokens:
            return None
        try:
            if len(tokens) > 1:
                raise _TokenError("there are several")
            return self._principal(self._verified(tokens[0]))
        except _TokenError as error:
            message = f"The gateway's token is not accepted: {error}."
            raise ApiError(401, message, code="invalid_gateway_token") from None

    def _verified(self, token: bytes) -> Mapping[str, Any]:
        """The claims, once their signature is known to be right."""
        parts = token.split(b".")
        if len(token) > _MAX_TOKEN_BYTES or len(parts) != 3:
            raise _TokenError("it is no token")
        header = _object(parts[0])
        if header.get("alg") != _ALGORITHM:
            raise _TokenError(f"its algorithm is not {_ALGORITHM}")
        self._reread()
        key = self._keys.get(str(header.get("kid")))
        if key is None:
            raise _TokenError("its key is none of this server's")
        try:
            key.verify(_decoded(parts[2]), parts[0] + b"." + parts[1])
        except InvalidSignature:
            raise _TokenError("its signature is wrong") from None
        return _object(parts[1])

    def _principal(self, claims: Mapping[str, Any]) -> Principal:
        issued, expires, now = claims.get("iat"), claims.get("exp"), self._clock()
        if type(issued) is not int or type(expires) is not int:
            raise _TokenError("it does not say how long it is valid")
        if not 0 < expires - issued <= MAX_LIFETIME_SECONDS:
            raise _TokenError(f"it is valid for more than {MAX_LIFETIME_SECONDS} s")
        if now >= expires + CLOCK_SKEW_SECONDS:
            raise _TokenError("it has expired")
        if now < issued - CLOCK_SKEW_SECONDS:
            raise _TokenError("it is of the future: compare the clocks of the nodes")
        if claims.get("aud") != self._audience:
            raise _TokenError("it is for another model")
        client, cache, model = (claims.get(name) for name in ("client", "cache", "model"))
        for text in (client, cache, model):
            if not isinstance(text, str) or not _NAME.fullmatch(text):
                raise _TokenError("a name in it is none")
        priority = claims.get("priority")
        if type(priority) is not int or not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise _TokenError("its priority is none")
        return Principal(str(client), f"gateway/{cache}", priority, model=str(model))

    def _reread(self) -> None:
        now = self._monotonic()
        if self._directory is None or now - self._read_at < _REREAD_SECONDS:
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


def require_access(keys: Keys, gateways: GatewayKeys, scope: Scope) -> None:
    """Note in the scope who a request is for. Raises a 401 where neither a gateway nor an API key says so,
    and a 403 where the path needs an admin's key.
    """
    signed = gateways.principal_of(scope)
    if signed is not None:
        admit(signed, scope)
    elif gateways.required and not keys.required:
        message = "This server answers its gateway only: send the request there."
        raise ApiError(401, message, code="gateway_token_required")
    else:
        require_key(keys, scope)


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
        raise _TokenError("it is no token") from None
    if not isinstance(value, dict):
        raise _TokenError("it is no token")
    return value


def _decoded(part: bytes) -> bytes:
    try:
        return base64.b64decode(part + b"=" * (-len(part) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise _TokenError("it is no token") from None
