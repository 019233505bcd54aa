"""What answers hold. Called by `openapi`. The shapes are OpenAI's, see `shapes`. Pure."""

from __future__ import annotations

from quire_server.api.json_schema import Schema

_INTEGER: Schema = {"type": "integer", "minimum": 0}
_NULLABLE_STRING: Schema = {"type": ["string", "null"]}
_ERROR_BODY: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "What is wrong, and what to do."},
                "type": {"type": "string"},
                "param": _NULLABLE_STRING | {"description": "The field of the request."},
                "code": _NULLABLE_STRING | {"description": "The reason, for programs."},
            },
        }
    },
}


def components() -> dict[str, Schema]:
    """Every schema of an answer, by name."""
    return {
        "Error": _ERROR_BODY,
        "Usage": _usage(),
        "ChatCompletion": _completion("chat.completion", _chat_choice("message")),
        "ChatCompletionChunk": _completion("chat.completion.chunk", _chat_choice("delta"), is_chunk=True),
        "Completion": _completion("text_completion", _text_choice()),
        "Model": _model(),
        "Models": _object(
            {"object": {"const": "list"}, "data": {"type": "array", "items": ref("Model")}},
        ),
        "Tokens": _object(
            {
                "count": _INTEGER,
                "max_model_len": {"type": ["integer", "null"]},
                "tokens": {"type": "array", "items": _INTEGER},
            }
        ),
        "Text": _object({"prompt": {"type": "string"}}),
        "Version": _object({"version": {"type": "string"}}),
        "Health": _object(
            {
                "status": {"enum": ["healthy", "degraded"]},
                "checks": {"type": "object", "additionalProperties": {"type": ["boolean", "null"]}},
                "numbers": {"type": "object", "additionalProperties": {"type": "object"}},
                "version": {"type": "string"},
            }
        ),
        "Empty": {"type": "object", "maxProperties": 0},
    }


def ref(name: str) -> Schema:
    """A reference to one of the components."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict[str, Schema]) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _completion(kind: str, choice: Schema, *, is_chunk: bool = False) -> Schema:
    usage: Schema = {"anyOf": [ref("Usage"), {"type": "null"}]} if is_chunk else ref("Usage")
    properties: dict[str, Schema] = {
        "id": {"type": "string"},
        "object": {"const": kind},
        "created": _INTEGER,
        "model": {"type": "string"},
        "system_fingerprint": {"type": "string"},
        "choices": {"type": "array", "items": choice},
        "usage": usage,
    }
    required = [name for name in properties if not (is_chunk and name == "usage")]
    return {"type": "object", "properties": properties, "required": required}


def _chat_choice(said: str) -> Schema:
    content = {"type": "string"}
    message: Schema = {"type": "object", "properties": {"role": {"const": "assistant"}, "content": content}}
    if said == "message":
        message["required"] = ["role", "content"]
    return _choice({said: message})


def _text_choice() -> Schema:
    return _choice({"text": {"type": "string"}})


def _choice(said: dict[str, Schema]) -> Schema:
    return _object(
        {
            "index": _INTEGER,
            **said,
            "logprobs": {"type": ["object", "null"]},
            "finish_reason": {"enum": ["stop", "length", None]},
        }
    )


def _model() -> Schema:
    return _object(
        {
            "id": {"type": "string"},
            "object": {"const": "model"},
            "created": _INTEGER,
            "owned_by": {"type": "string"},
            "max_model_len": {"type": ["integer", "null"]},
        }
    )


def _usage() -> Schema:
    return _object(
        {
            "prompt_tokens": _INTEGER,
            "completion_tokens": _INTEGER,
            "total_tokens": _INTEGER,
            "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
        }
    )
