"""What is kept of a stream so that another replica can go on with it where its own is lost. Pure.

Replicas name the tokens of each event in a comment, which is for the gateway and is taken out. Another
replica goes on after exactly these tokens: of a greedy or seeded answer with the same ones as the lost one.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

_TOKEN_IDS = re.compile(rb"\d{1,10}(,\d{1,10})*")
_TOKENS, _LINE, _EVENT = b": tokens ", b"\n", b"\n\n"
_DATA, _DONE = b"data: ", b"data: [DONE]"
_ERROR = b'data: {"error":'
_FINISHED = b'"finish_reason":"'  # else it is null; in a text its quotes are escaped
_REPLICAS_FAULT = frozenset(("server_error", "overloaded_error"))


class Resumption:
    """One stream."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._head: tuple[str, int] | None = None  # id and time of its events
        self._num_events = 0
        self._is_broken = False  # what was sent no other replica goes on with: half an event, unknown tokens
        self.is_finished = False  # all of the answer was sent, but maybe not its usage
        self.is_done = False  # all was sent

    @property
    def is_possible(self) -> bool:
        """Whether it is known where to go on."""
        is_known = self._num_events < 2 or bool(self._token_ids)
        return is_known and not self.is_finished and not self._is_broken

    def take(self, events: bytes) -> tuple[bytes, str]:
        """Keep what whole events say; those for the client, and why the replica ends the stream too early,
        empty where it does not. An event may be too long to be waited for: then nothing goes on after it.
        """
        self._is_broken = self._is_broken or (events != b"" and not events.endswith(_EVENT))
        if self._is_broken:
            return events, ""
        error, at = "", _find_line(events, _ERROR)
        if at >= 0 and (error := _fault(events[at:])):
            events = events[:at]
        events = self._without_tokens(events)
        if self._head is None and _find_line(events, _DATA) >= 0:
            self._head = _head(events)
            self._is_broken = self._is_broken or self._head is None
        self._num_events += events.count(_EVENT)
        self.is_finished = self.is_finished or _FINISHED in events
        self.is_done = self.is_done or _find_line(events, _DONE) >= 0
        return events, error

    @property
    def resume(self) -> dict[str, Any] | None:
        """The field of a request that goes on after what was sent; None where nothing was."""
        if self._head is None:
            return None
        identity, created = self._head
        return {"id": identity, "created": created, "token_ids": self._token_ids}

    def _without_tokens(self, events: bytes) -> bytes:
        at = _find_line(events, _TOKENS)
        if at < 0:
            return events
        kept, begin = [], 0
        while at >= 0:
            end = events.index(_LINE, at)
            ids = events[at + len(_TOKENS) : end]
            if _TOKEN_IDS.fullmatch(ids):
                self._token_ids += map(int, ids.split(b","))
            else:
                self._is_broken = True
            kept.append(events[begin:at])
            begin = end + 1
            at = _find_line(events, _TOKENS, begin)
        return b"".join((*kept, events[begin:]))


def _find_line(events: bytes, prefix: bytes, start: int = 0) -> int:
    """Where a line begins with this, -1: nowhere."""
    at = events.find(prefix, start)
    while at > 0 and events[at - 1 : at] != _LINE:
        at = events.find(prefix, at + 1)
    return at


def _head(events: bytes) -> tuple[str, int] | None:
    at = _find_line(events, _DATA)
    if at < 0:
        return None
    try:
        document: dict[str, Any] = orjson.loads(events[at + len(_DATA) : events.index(_EVENT, at)])
        created = document["created"]
        return (str(document["id"]), created) if type(created) is int else None
    except (ValueError, KeyError, TypeError):
        return None


def _fault(event: bytes) -> str:
    """The code of an error that another replica may not have, empty for one that it has as well."""
    try:
        error = orjson.loads(event[len(_DATA) : event.index(_EVENT)])["error"]
        return str(error["code"] or error["type"]) if error["type"] in _REPLICAS_FAULT else ""
    except (ValueError, KeyError, TypeError):
        return ""
