"""Lines of batches: requests in the name of a client who is not there, asked for by quire-batch.

When a client submits work, the gateway gives quire-batch a token for it, the delegation: whose key it was, by
its digest, for as long as a batch may take. quire-batch sends it back with each line, in the place of the
key, which it never had. So a line has the client's models, limits and budget as they are now, and stops
with the key: a delegation is worth what its key is worth, and has the priority of batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from quire_gateway.request_signing import RequestSigner
from quire_http.errors import ApiError
from quire_http.signed_token import TokenError, TrustedKeys

DELEGATION_HEADER = "x-quire-delegation"
#: A day, in which batches end, and an hour for lines that were begun in it.
LIFETIME_SECONDS = 25 * 3600
#: The engine's number of the class `low`.
BATCH_PRIORITY = 10
_AUDIENCE = "quire-gateway"
_NAME = DELEGATION_HEADER.encode()


class Delegations:
    """Those of the gateways that share a signing key."""

    def __init__(
        self, signer: RequestSigner, trusted: TrustedKeys, clock: Callable[[], float] = time.time
    ) -> None:
        self._signer = signer
        self._trusted = trusted
        self._clock = clock

    def delegation(self, key_hash: str) -> str:
        """Of a client with a key of this digest, empty where it has none."""
        return self._signer.signed({"aud": _AUDIENCE, "key": key_hash}, LIFETIME_SECONDS)

    def key_hash(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """The digest of the key for which a line is; None of a request that is no line. Raises a 401."""
        given = [value for name, value in headers if name == _NAME]
        if not given:
            return None
        try:
            if len(given) > 1:
                raise TokenError("there are several")
            claims = self._trusted.claims(given[0], _AUDIENCE, self._clock(), LIFETIME_SECONDS)
        except TokenError as error:
            message = f"The delegation is not accepted: {error}."
            raise ApiError(401, message, code="invalid_delegation") from None
        return str(claims.get("key"))
