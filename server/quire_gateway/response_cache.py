"""Whole answers that are given again: to the same client, for the same bytes, of the same LLMDeployment.

Only answers that every replica would give alike are kept, for as long as the route says, in this gateway's
memory. Those that were used longest ago go first. Pure but for the clock that it is given.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_BYTES = 64 << 20
MAX_ANSWER_BYTES = 1 << 20

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer with the status 200, as it was sent."""

    headers: Headers
    body: bytes


@dataclass(slots=True)
class Recording:
    """An answer while it is sent, until it is whole; nothing of one that is too long, or went wrong."""

    key: bytes
    headers: Headers = ()
    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    is_whole: bool = False

    def begin(self, status: int, headers: Headers) -> None:
        """The head of an answer."""
        self.headers, self.parts, self.num_bytes = headers, [], 0 if status == 200 else MAX_ANSWER_BYTES + 1

    def add(self, data: bytes) -> None:
        """The next bytes."""
        self.num_bytes += len(data)
        if self.num_bytes <= MAX_ANSWER_BYTES:
            self.parts.append(data)
        else:
            self.parts.clear()

    @property
    def answer(self) -> CachedAnswer | None:
        """What can be kept."""
        if not self.is_whole or self.num_bytes > MAX_ANSWER_BYTES:
            return None
        return CachedAnswer(self.headers, b"".join(self.parts))


class ResponseCache:
    """That of one gateway."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._answers: OrderedDict[bytes, tuple[float, CachedAnswer]] = OrderedDict()  # with their end
        self.num_bytes = 0

    def get(self, key: bytes) -> CachedAnswer | None:
        """The answer of this key that is still valid."""
        end, answer = self._answers.get(key, (0.0, None))
        if answer is None:
            return None
        if end <= self._clock():
            self._remove(key)
            return None
        self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, answer: CachedAnswer, seconds: float) -> None:
        """Keep an answer for so long."""
        self._remove(key)
        self._answers[key] = self._clock() + seconds, answer
        self.num_bytes += _size(answer)
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._answers)))

    def _remove(self, key: bytes) -> None:
        if (known := self._answers.pop(key, None)) is not None:
            self.num_bytes -= _size(known[1])


def cache_key(client: str, model: str, version: str, path: str, body: bytes | bytearray) -> bytes:
    """``client``: its UID; ``model``: the LLMDeployment, and ``version``: its UID and generation."""
    digest = hashlib.blake2b("\0".join((client, model, version, path, "")).encode(), digest_size=32)
    digest.update(body)
    return digest.digest()


def _size(answer: CachedAnswer) -> int:
    return len(answer.body) + 1024  # with what Python needs for it
