"""Whether a client wants to know when each of its tokens came. Called by `completions`."""

from __future__ import annotations

from quire_server.api.errors import ApiError
from quire_server.api.reply import Reply

HEADER = "x-quire-token-timing"


def is_wanted(reply: Reply) -> bool:
    """Raises a 400 for a value that is neither true nor false."""
    given = {value.lower() for name, value in reply.scope["headers"] if name == HEADER.encode()}
    if not given <= {b"true", b"false"} or len(given) > 1:
        raise ApiError(400, f"{HEADER}: must be true or false; send it once", param=HEADER)
    return given == {b"true"}
