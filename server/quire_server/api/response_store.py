"""Responses that are kept so that a conversation can go on by `previous_response_id`: in memory, bounded.

The least recently used are dropped first, those of a client that has more than half of the memory before
those of others; each client finds its own alone, and nothing outlives the process.
Both are what the API promises: a store that is asked for is a convenience, not a record.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
#: Of all responses together, as they are encoded.
MAX_BYTES = 64 << 20
_OVERHEAD = 1024  # bytes of an entry beside its texts


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """``body``: the response; ``conversation``: its messages and those before, as templates take them."""

    body: bytes
    conversation: bytes

    @property
    def size(self) -> int:
        """Bytes that count."""
        return len(self.body) + len(self.conversation) + _OVERHEAD


class ResponseStore:
    """All kept responses, by client and id. Bodies are parsed in threads, so it has a lock."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._ids: dict[str, OrderedDict[str, None]] = {}  # of each client, in the same order
        self._bytes = Counter[str]()  # of each client
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Of all responses."""
        return self._bytes.total()

    def put(self, client: str, response_id: str, response: StoredResponse) -> None:
        """Keep a response, and drop what has no room beside it; one that is too long alone is not kept."""
        if response.size > self._max_bytes:
            return
        with self._lock:
            self._drop(client, response_id)
            self._kept[client, response_id] = response
            self._ids.setdefault(client, OrderedDict())[response_id] = None
            self._bytes[client] += response.size
            while self.num_bytes > self._max_bytes:
                self._drop(*self._next())

    def get(self, client: str, response_id: str) -> StoredResponse | None:
        """A client's own response, which is now the most recently used."""
        with self._lock:
            if (found := self._kept.get((client, response_id))) is not None:
                self._kept.move_to_end((client, response_id))
                self._ids[client].move_to_end(response_id)
            return found

    def delete(self, client: str, response_id: str) -> bool:
        """Whether there was one."""
        with self._lock:
            return self._drop(client, response_id)

    def _next(self) -> tuple[str, str]:
        """The client and the id of the response that is dropped next."""
        most, num_bytes = max(self._bytes.items(), key=lambda one: one[1])
        if num_bytes > self._max_bytes // 2 and len(self._ids[most]) > 1:
            return most, next(iter(self._ids[most]))
        return next(iter(self._kept))

    def _drop(self, client: str, response_id: str) -> bool:
        """Whether there was one."""
        if (found := self._kept.pop((client, response_id), None)) is None:
            return False
        self._bytes[client] -= found.size
        del self._ids[client][response_id]
        if not self._ids[client]:
            del self._ids[client], self._bytes[client]
        return True

    def conversation(self, client: str, response_id: str) -> Sequence[Json] | None:
        """The messages of a client's own response, None where there is none."""
        found = self.get(client, response_id)
        return None if found is None else list(json.loads(found.conversation))
