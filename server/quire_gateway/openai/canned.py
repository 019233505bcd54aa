"""An answer with a text that is given: in OpenAI's shape, whole or as a stream. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from quire_gateway.openai.calls import CHAT

_NOTHING = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def answer(path: str, model: str, text: str, request_id: str, created: int) -> bytes:
    """The body of an answer in one piece."""
    is_chat = path == CHAT
    message = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    envelope = _envelope(model, request_id, created, "chat.completion" if is_chat else "text_completion")
    return orjson.dumps({**envelope, "choices": _choices(message, "stop"), "usage": _NOTHING})


def stream(
    path: str, model: str, text: str, request_id: str, created: int, *, include_usage: bool = False
) -> bytes:
    """All events of a stream."""
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


def _envelope(model: str, request_id: str, created: int, kind: str) -> dict[str, Any]:
    return {"id": f"canned-{request_id}", "object": kind, "created": created, "model": model}


def _choices(content: dict[str, Any], finish_reason: str | None) -> list[dict[str, Any]]:
    return [{"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}]
