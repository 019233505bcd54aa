"""One line of an input file: is it a request that can be made, and with which others is it best made?

Lines are asked for in the order of what their prompts begin with, so that neighbours share what replicas have
in their prefix caches. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from quire_http.exchange import MAX_BODY_BYTES

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_PREFIX_BYTES = 512  # of the prompt, that lines are sorted by
_CUSTOM_ID = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
_FRAME_BYTES = 4096  # of a line around its body
#: The longest line that is read.
MAX_LINE_BYTES = MAX_BODY_BYTES + _FRAME_BYTES


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch. ``number``: its place in the file, from 1."""

    number: int
    custom_id: str
    body: bytes
    prefix: bytes


class LineError(Exception):
    """Why a line is no request, in the fields of OpenAI's errors."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def split(parts: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, without those that are empty. Of one that is too long there is
    a byte more than is allowed, and the rest is dropped.
    """
    number, line = 1, bytearray()
    for part in parts:
        begin = 0
        while (end := part.find(b"\n", begin)) >= 0:
            line += part[begin : min(end, begin + MAX_LINE_BYTES + 1 - len(line))]
            if whole := line.strip():
                yield number, bytes(whole)
            number, begin = number + 1, end + 1
            line.clear()
        line += part[begin : begin + MAX_LINE_BYTES + 1 - len(line)]
    if whole := line.strip():
        yield number, bytes(whole)


def parse(number: int, data: bytes, endpoint: str) -> Line:
    """A line of a batch for this endpoint. Raises LineError."""
    if len(data) > MAX_LINE_BYTES:
        raise LineError("line_too_long", f"The line is longer than {MAX_LINE_BYTES} bytes.")
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise LineError("invalid_json_line", f"The line is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise LineError("invalid_json_line", "The line must be a JSON object.")
    custom_id = document.get("custom_id")
    if not isinstance(custom_id, str) or not _CUSTOM_ID.fullmatch(custom_id):
        message = "must be a text of 1 to 256 characters without control characters"
        raise LineError("invalid_custom_id", message, "custom_id")
    if document.get("method") != "POST":
        raise LineError("invalid_method", "must be POST", "method")
    if document.get("url") != endpoint:
        raise LineError("mismatched_url", f"must be {endpoint}, the endpoint of the batch", "url")
    return Line(number, custom_id, *request(document.get("body")))


def request(body: Any) -> tuple[bytes, bytes]:
    """The bytes of a request's body, and its prefix. Raises LineError."""
    if not isinstance(body, dict):
        raise LineError("invalid_body", "must be a JSON object", "body")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise LineError("missing_required_parameter", "must be the name of a model", "body.model")
    if body.get("stream"):
        raise LineError(
            "stream_not_supported",
            "must be absent or false: the answers of a batch are read from a file",
            "body.stream",
        )
    try:
        encoded = orjson.dumps(body)
    except TypeError as error:  # nested too deep to be written again
        raise LineError("invalid_body", f"cannot be sent: {error}", "body") from None
    if len(encoded) > MAX_BODY_BYTES:
        raise LineError("line_too_long", f"must be at most {MAX_BODY_BYTES} bytes", "body")
    return encoded, _prefix(model, body)


def _prefix(model: str, body: dict[str, Any]) -> bytes:
    """What lines are sorted by: the model, then the beginning of the prompt."""
    texts = (part.encode() for part in _texts(body.get("messages", body.get("prompt", body.get("input")))))
    return b"\0".join((model.encode()[:128], _beginning(texts)))


def _beginning(parts: Iterable[bytes]) -> bytes:
    found = b""
    for part in parts:
        found += part + b"\0"
        if len(found) >= _PREFIX_BYTES:
            break
    return found[:_PREFIX_BYTES]


def _texts(value: Any) -> Iterator[str]:
    """All texts and numbers of a prompt, in their order."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            left += reversed(one.values())
        elif isinstance(one, list):
            left += reversed(one)
        elif type(one) is int:
            yield str(one)
