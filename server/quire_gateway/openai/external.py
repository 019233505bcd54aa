"""What is sent to an OpenAI-compatible endpoint of others, and what of its streams a client gets. Pure.

Fields that only our model servers know stay here. A stream is asked for its usage, which is taken out for a
client that did not ask for it. Nothing is believed of the answer: a stream whose events are none, or that
ends without an end, has failed.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from quire_gateway.events import WholeEvents
from quire_gateway.openai.calls import written

#: Fields of requests to our model servers that nothing else is to see.
OWN_FIELDS = frozenset(
    (
        *("bad_words", "cache_control", "cache_salt", "priority", "resume", "retry_on_timeout"),
        *("structured_outputs", "timeout", "watermark"),
    )
)
_OWN_STREAM_OPTIONS = frozenset(("continuous_usage_stats",))
_FIELDS = (b"data:", b":", b"event:", b"id:", b"retry:")
_DATA, _DONE, _EVENT = b"data:", b"[DONE]", b"\n\n"
_USAGE = b'"usage"'
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')  # else it is null; in a text its quotes are escaped
_ERROR = b'"error"'
_ERROR_EVENT = re.compile(rb"^event:[ ]?error\s*$", re.MULTILINE)
_MAX_EVENT_BYTES = 1 << 20


def request_body(body: bytes | bytearray, model: str) -> bytes:
    """The body to send, with the backend's name of the model. Raises ApiError where it is nested too deep."""
    document = {name: value for name, value in orjson.loads(body).items() if name not in OWN_FIELDS}
    document["model"] = model
    if document.get("stream") is True:
        given = document.get("stream_options")
        options = given if isinstance(given, dict) else {}
        kept = {name: value for name, value in options.items() if name not in _OWN_STREAM_OPTIONS}
        document["stream_options"] = {**kept, "include_usage": True}
    return written(document)


class ExternalEvents(WholeEvents):
    """One stream. Lines may end with CR and LF, which become LF. ``keeps_usage``: the client asked for it."""

    def __init__(self, *, keeps_usage: bool, num_answers: int = 1) -> None:
        super().__init__()
        self._num_answers = num_answers  # that the client asked for
        self._finished: set[str] = set()  # their indexes
        self._keeps_usage = keeps_usage
        self._carriage_return = b""
        self.is_finished = False  # all of the answer was sent, but maybe not its usage
        self.is_done = False  # all was sent

    def add(self, data: bytes) -> bytes:
        """The bytes of whole events."""
        data = self._carriage_return + data
        self._carriage_return = b"\r" if data.endswith(b"\r") else b""
        return super().add(data.removesuffix(b"\r").replace(b"\r\n", b"\n"))

    def take(self, events: bytes) -> tuple[bytes, str]:
        """Those for the client, and what is wrong with the next one, empty where nothing is."""
        kept: list[bytes] = []
        for event in filter(None, (part.strip(b"\n") for part in events.split(_EVENT))):
            if len(event) > _MAX_EVENT_BYTES or not event.startswith(_FIELDS):
                return _joined(kept), "it sends no server-sent events"
            data = _data_of(event)
            if _ERROR_EVENT.search(event) or (_ERROR in data and (_chunk(data) or {}).get("error")):
                return _joined(kept), "it sends an error"  # which may be about the account there
            if not data:
                kept.append(event)
                continue
            self.is_done = self.is_done or data == _DONE
            if _FINISHED.search(data) is not None:
                self._finished |= _finished_in(data)
            self.is_finished = self.is_done or len(self._finished) >= self._num_answers
            if self._keeps_usage or not _is_usage_alone(data):
                kept.append(event)
        return _joined(kept), ""

    def rest(self) -> bytes:
        """What ends the stream: its last event, where the empty line is missing. Half an event is dropped."""
        last = super().rest().strip(b"\n")
        data = _data_of(last)
        kept = self.take(last)[0] if data == _DONE or _chunk(data) is not None else b""
        return kept + (b"data: [DONE]\n\n" if self.is_finished and not self.is_done else b"")


def _data_of(event: bytes) -> bytes:
    """That of an event, which may have other lines before it."""
    lines = (line[len(_DATA) :].strip() for line in event.split(b"\n") if line.startswith(_DATA))
    return b"\n".join(lines)


def _finished_in(data: bytes) -> set[str]:
    """The indexes of the answers that end with this chunk."""
    choices = (_chunk(data) or {}).get("choices")
    found = [one for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []
    return {str(one.get("index", 0)) for one in found if isinstance(one.get("finish_reason"), str)}


def _joined(events: list[bytes]) -> bytes:
    return b"".join(event + _EVENT for event in events)


def _is_usage_alone(data: bytes) -> bool:
    """Whether this is the chunk that `include_usage` adds."""
    if _USAGE not in data:
        return False
    chunk = _chunk(data) or {}
    return chunk.get("choices") == [] and bool(chunk.get("usage"))


def _chunk(data: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
