"""An answer with a text that is given: in the shape of the API that it is for, whole or as a stream. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from quire_http.dialects import CHAT, COUNT_TOKENS, MESSAGES

_NOTHING = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
_NO_TOKENS = {"input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
_MESSAGE_ENDS = {"stop_reason": "end_turn", "stop_sequence": None}


def answer(path: str, model: str, text: str, request_id: str, created: int) -> bytes:
    """The body of an answer in one piece."""
    if path == COUNT_TOKENS:
        return orjson.dumps({"input_tokens": 0})
    if path == MESSAGES:
        message = _message(model, request_id, [{"type": "text", "text": text}])
        return orjson.dumps({**message, **_MESSAGE_ENDS, "usage": _NO_TOKENS})
    is_chat = path == CHAT
    message = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    envelope = _envelope(model, request_id, created, "chat.completion" if is_chat else "text_completion")
    return orjson.dumps({**envelope, "choices": _choices(message, "stop"), "usage": _NOTHING})


def stream(
    path: str, model: str, text: str, request_id: str, created: int, *, include_usage: bool = False
) -> bytes:
    """All events of a stream."""
    if path == MESSAGES:
        return _message_events(model, text, request_id)
    is_chat = path == CHAT
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    envelope = _envelope(model, request_id, created, kind)
    first: dict[str, Any] = {"delta": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
    chunks = [_choices(first, None), _choices(last, "stop")]
    bodies = [{**envelope, "choices": choices} for choices in chunks]
    if include_usage:
        bodies = [{**body, "usage": None} for body in bodies] + [
            {**envelope, "choices": [], "usage": _NOTHING}
        ]
    return b"".join(b"data: " + orjson.dumps(body) + b"\n\n" for body in bodies) + b"data: [DONE]\n\n"


def _message(model: str, request_id: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    """Anthropic's, without its end."""
    identity = {"id": f"canned-{request_id}", "type": "message", "role": "assistant", "model": model}
    return {**identity, "content": content}


def _message_events(model: str, text: str, request_id: str) -> bytes:
    begun = {"stop_reason": None, "stop_sequence": None, "usage": _NO_TOKENS}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**_message(model, request_id, []), **begun}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": _MESSAGE_ENDS, "usage": _NO_TOKENS},
        {"type": "message_stop"},
    ]
    return b"".join(b"event: %b\ndata: %b\n\n" % (one["type"].encode(), orjson.dumps(one)) for one in events)


def _envelope(model: str, request_id: str, created: int, kind: str) -> dict[str, Any]:
    return {"id": f"canned-{request_id}", "object": kind, "created": created, "model": model}


def _choices(content: dict[str, Any], finish_reason: str | None) -> list[dict[str, Any]]:
    return [{"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}]
