"""The tokens that an answer says it took, found in its bytes.

In JSON no text of a model or a client has these quotes unescaped, so that nothing need be parsed. Where an
API has objects of a model or a client in its answers, such as the input of a call, the usage comes after
them. A replica ends each stream with a comment that says them, which is for the gateway and is taken out.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_KEY = b'"usage"'
_PROMPT = b'"prompt_tokens":'
_NUMBER = re.compile(rb"\s*(\d{1,9})\b")
_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d{1,9})\b')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d{1,9})\b')
_INPUT, _OUTPUT = b'"input_tokens":', re.compile(rb'"output_tokens":\s*(\d{1,9})\b')
_CACHE_READ = re.compile(rb'"cache_read_input_tokens":\s*(\d{1,9})\b')  # which are no input tokens
_COMMENT, _END = b": usage ", b"\n\n"


class Usage(NamedTuple):
    """Tokens of one request. ``cached``: of the prompt, None where the answer does not say it."""

    prompt: int
    completion: int
    cached: int | None = None


def find(data: bytes) -> Usage | None:
    """The last usage that stands in these bytes."""
    at = data.rfind(_PROMPT)
    if at < 0 or (prompt := _NUMBER.match(data, at + len(_PROMPT))) is None:
        return None
    begin = max(data.rfind(_KEY, 0, at), data.rfind(_COMMENT, 0, at))  # its fields may have any order
    begin = at if begin < 0 else begin
    completion, cached = _COMPLETION.search(data, begin), _CACHED.search(data, begin)
    return Usage(int(prompt[1]), int(completion[1]) if completion else 0, int(cached[1]) if cached else None)


def find_last(data: bytes) -> Usage | None:
    """As `find`, of an API whose usage has input and output tokens, and nothing of a client after it."""
    at = data.rfind(_INPUT)
    if at < 0 or (read := _NUMBER.match(data, at + len(_INPUT))) is None:
        return None
    begin = max(data.rfind(_KEY, 0, at), 0)
    output, cached = _OUTPUT.search(data, begin), _CACHE_READ.search(data, begin)
    num_output = int(output[1]) if output else 0
    if cached is not None:
        return Usage(int(read[1]) + int(cached[1]), num_output, int(cached[1]))
    within = _CACHED.search(data, begin)
    return Usage(int(read[1]), num_output, int(within[1]) if within else None)


def find_in_comment(events: bytes) -> Usage | None:
    """That of the replica's comment in whole events, whatever the events have: these may repeat objects of
    the client's, and an event that begins an answer says a usage before there is one.
    """
    at, end = _comment(events)
    return find(events[at:end]) if end else None


def without_comment(events: bytes) -> bytes:
    """Whole events without the replica's comment."""
    at, end = _comment(events)
    return events[:at] + events[end:] if end else events


def _comment(events: bytes) -> tuple[int, int]:
    """Where the replica's comment begins and ends; (0, 0) where there is none."""
    at = 0
    if not events.startswith(_COMMENT):
        if (before := events.find(_END + _COMMENT)) < 0:
            return 0, 0
        at = before + len(_END)
    end = events.find(_END, at)
    return (0, 0) if end < 0 else (at, end + len(_END))
