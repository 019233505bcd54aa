"""Requests that a gateway has signed: whose they are, their highest priority, and whose cache they share.

A token is made for one LLMDeployment and for less than a minute (see `quire_http.signed_token`). With a
directory of keys and no API keys only signed requests are served; a directory without a key denies every
request.

A token that was seen on its way can be used again until it expires: it has no nonce, because replicas share
no memory. NetworkPolicies keep others off that way, and nothing else than requests to the same model is won.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.types import Scope

from quire_http.errors import ApiError
from quire_http.signed_token import TokenError, TrustedKeys
from quire_server.api.auth import Keys, Principal, admit, require_key
from quire_server.core.policy import MAX_PRIORITY, MIN_PRIORITY

TOKEN_HEADER = b"x-quire-gateway-token"
MAX_LIFETIME_SECONDS = 60
_NAME = re.compile(r"[^\x00-\x1f\x7f]{0,253}")


class GatewayKeys:
    """The keys of the gateways that are trusted. ``audience``: NAMESPACE/NAME of the LLMDeployment."""

    def __init__(
        self,
        directory: Path | None,
        audience: str,
        monotonic: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._trusted = None if directory is None else TrustedKeys(directory, monotonic)
        self._audience = audience
        self._clock = clock  # of the wall

    @classmethod
    def none(cls) -> GatewayKeys:
        """No gateway is trusted."""
        return cls(None, "", time.monotonic, time.time)

    @property
    def required(self) -> bool:
        """False where this server trusts no gateway: tokens mean nothing then."""
        return self._trusted is not None

    def principal_of(self, scope: Scope) -> Principal | None:
        """Who a signed request is for; None where it is not signed. Raises a 401."""
        if self._trusted is None:
            return None
        tokens = [value for name, value in scope["headers"] if name == TOKEN_HEADER]
        if not tokens:
            return None
        try:
            if len(tokens) > 1:
                raise TokenError("there are several")
            now, longest = self._clock(), MAX_LIFETIME_SECONDS
            return _principal(self._trusted.claims(tokens[0], self._audience, now, longest))
        except TokenError as error:
            message = f"The gateway's token is not accepted: {error}."
            raise ApiError(401, message, code="invalid_gateway_token") from None


def _principal(claims: Mapping[str, Any]) -> Principal:
    client, cache, model = (claims.get(name) for name in ("client", "cache", "model"))
    for text in (client, cache, model):
        if not isinstance(text, str) or not _NAME.fullmatch(text):
            raise TokenError("a name in it is none")
    priority = claims.get("priority")
    if type(priority) is not int or not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise TokenError("its priority is none")
    return Principal(str(client), f"gateway/{cache}", priority, model=str(model))


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
