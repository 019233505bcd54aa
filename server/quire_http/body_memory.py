"""One budget of memory for the bodies of all requests that are read, parsed and tokenised.

A body's share is taken before its bytes are read, grows with what they will become in memory, and is given
back when its prompt is tokenised, or the request ends. A client may hold as much as it leaves free, so that
one that takes all it can get leaves half to the others; with small bodies three times as much, so that a few
long ones do not keep out the others of the same client, as all are where there are no keys. Knows no HTTP and
no JSON.
"""

from __future__ import annotations

from collections import Counter

from quire_http.errors import overloaded

#: Bytes. The longest body takes at most 48 MiB, if all of it is one string with one wide character.
MEMORY_LIMIT = 64 << 20
_SMALL_SHARE = 256  # of the limit: 256 KiB
_RETRY_AFTER = 1  # a body is read and parsed in less


class BodyMemory:
    """The budget."""

    def __init__(self, limit: int = MEMORY_LIMIT) -> None:
        self.limit = limit
        self.in_use = 0
        self._by_client = Counter[str]()

    def share(self, client: str) -> BodyShare:
        """The share of a new request, of nothing yet."""
        return BodyShare(self, client)

    def _has_room(self, client: str, held: int, more: int) -> bool:
        """Whether a request that holds so much may have more, beside what the client holds for others. One
        request alone may have all that is free.
        """
        others = self._by_client[client] - held
        left = self.limit - self.in_use - more
        is_small = held + more <= self.limit // _SMALL_SHARE
        return left >= 0 and (not others or others + held + more <= left * (3 if is_small else 1))

    def _take(self, client: str, held: int, more: int) -> None:
        if not self._has_room(client, held, more):
            raise overloaded(
                "body_memory",
                f"the bodies of requests that are being read take {self.in_use >> 20} MiB of memory, "
                f"{self._by_client[client] >> 20} MiB of it for this key, of at most {self.limit >> 20} MiB",
                _RETRY_AFTER,
            )
        self._change(client, more)

    def _change(self, client: str, more: int) -> None:
        self.in_use += more
        self._by_client[client] += more
        if not self._by_client[client]:
            del self._by_client[client]


class BodyShare:
    """What one request holds of the budget."""

    def __init__(self, memory: BodyMemory, client: str) -> None:
        self._memory = memory
        self._client = client
        self._held = 0

    def grow_to(self, num_bytes: int) -> None:
        """Hold at least so much. Raises ApiError where there is no room for it."""
        if num_bytes > self._held:
            self._memory._take(self._client, self._held, num_bytes - self._held)
            self._held = num_bytes

    def shrink_to(self, num_bytes: int) -> None:
        """Hold at most so much."""
        if num_bytes < self._held:
            self._memory._change(self._client, num_bytes - self._held)
            self._held = num_bytes

    def release(self) -> None:
        """Give everything back."""
        self._memory._change(self._client, -self._held)
        self._held = 0
