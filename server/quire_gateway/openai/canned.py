"""An answer with a text that is given: in the shape of the API that it is for, whole or as a stream. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from quire_http.dialects import CHAT, COUNT_TOKENS, MESSAGES, RESPONSES

_NOTHING = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
_NO_TOKENS = {"input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
_NO_RESPONSE_TOKENS = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}
_MESSAGE_ENDS = {"stop_reason": "end_turn", "stop_sequence": None}


def answer(path: str, model: str, text: str, request_id: str, created: int) -> bytes:
    """The body of an answer in one piece."""
    if path == COUNT_TOKENS:
        return orjson.dumps({"input_tokens": 0})
    if path == MESSAGES:
        message = _message(model, request_id, [{"type": "text", "text": text}])
        return orjson.dumps({**message, **_MESSAGE_ENDS, "usage": _NO_TOKENS})
    if path == RESPONSES:
        return orjson.dumps(_response(model, request_id, created, [_item(text, request_id)]))
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
    if path == RESPONSES:
        return _response_events(model, text, request_id, created)
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
    return _named(events)


def _named(events: list[dict[str, Any]]) -> bytes:
    """Events with the names of their types."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (one["type"].encode(), orjson.dumps(one)) for one in events)


def _item(text: str, request_id: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    identity = {"id": f"msg_canned-{request_id}", "type": "message", "status": "completed"}
    return {**identity, "role": "assistant", "content": [part]}


def _response(model: str, request_id: str, created: int, output: list[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's response, of a request of which nothing is repeated."""
    return {
        "id": f"resp_canned-{request_id}",
        "object": "response",
        "created_at": created,
        "status": "completed" if output else "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "store": False,
        "usage": _NO_RESPONSE_TOKENS if output else None,
    }


def _response_events(model: str, text: str, request_id: str, created: int) -> bytes:
    item = _item(text, request_id)
    begun: dict[str, Any] = _response(model, request_id, created, [])
    part: dict[str, Any] = item["content"][0]
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**item, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []},
        {"type": "response.output_text.done", **place, "text": text, "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": _response(model, request_id, created, [item])},
    ]
    return _named([{**one, "sequence_number": number} for number, one in enumerate(events)])


def _envelope(model: str, request_id: str, created: int, kind: str) -> dict[str, Any]:
    return {"id": f"canned-{request_id}", "object": kind, "created": created, "model": model}


def _choices(content: dict[str, Any], finish_reason: str | None) -> list[dict[str, Any]]:
    return [{"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}]
