"""Whose a request is: the gateway has checked the client's key, and says so in a token that it has signed.

With a request that creates work the gateway sends a second token, the delegation. It is kept with the work
and sent back with each line: the gateway then knows for which client, and by which key, a line is, and no
key of a client's is ever here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire_http.errors import ApiError
from quire_http.signed_token import TokenError, TrustedKeys

TOKEN_HEADER = "x-quire-gateway-token"
DELEGATION_HEADER = "x-quire-delegation"
AUDIENCE = "quire-batch"
_LONGEST_SECONDS = 60
_NAME = re.compile(r"[^\x00-\x1f\x7f]{0,507}")  # NAMESPACE/NAME


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. ``client``: the full name, empty where the gateway needs no keys."""

    client: str
    delegation: str = field(default="", repr=False)


class GatewayTokens:
    """What the gateways of these keys have signed."""

    def __init__(self, trusted: TrustedKeys, clock: Callable[[], float] = time.time) -> None:
        self._trusted = trusted
        self._clock = clock

    def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Who asks. Raises a 401."""
        given = [(name.decode("latin-1"), value) for name, value in headers]
        tokens = [value for name, value in given if name == TOKEN_HEADER]
        delegations = [value for name, value in given if name == DELEGATION_HEADER]
        if not tokens:
            message = "This server answers its gateway only: send the request there."
            raise ApiError(401, message, code="gateway_token_required")
        try:
            if len(tokens) > 1 or len(delegations) > 1:
                raise TokenError("there are several")
            client = self._trusted.claims(tokens[0], AUDIENCE, self._clock(), _LONGEST_SECONDS).get("client")
            if not isinstance(client, str) or not _NAME.fullmatch(client):
                raise TokenError("the client in it is none")
        except TokenError as error:
            message = f"The gateway's token is not accepted: {error}."
            raise ApiError(401, message, code="invalid_gateway_token") from None
        return Caller(client, delegations[0].decode("latin-1") if delegations else "")
