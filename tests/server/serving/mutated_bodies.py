"""Valid bodies of the server's POST routes, and what becomes of each where one value of it is an odd one.

A corpus and nothing else: what the server must answer is in `test_fuzz`. Between them the bodies have every
structure that a route reads: parts, tools, tool calls and their results, thoughts, formats, schemas.
"""

import json
import random

PREVIOUS = "@previous"  # stands for the id of a kept response
LONG = "x" * 100_000
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^a+$", "maxLength": 4}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"name": "f", "description": "d", "parameters": PARAMETERS}
FLAT_TOOL = {"type": "function", **TOOL, "strict": True}
CLAUDE_TOOL = {"name": "f", "description": "d", "input_schema": PARAMETERS}
SCHEMA_IN_ITSELF = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/x"}},
    "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}]}},
}
SAMPLED = {"model": "tiny", "temperature": 0.7, "top_p": 0.9}

# What json.dumps writes of no value: its stand-in, and the text that replaces it.
RAW = {
    "@1e400": "1e400",
    "@nan": "NaN",
    "@deep-list": "[" * 1000 + "]" * 1000,
    "@deep-object": '{"a":' * 1000 + "1" + "}" * 1000,
    "@digits": "9" * 5000,
    "@negative-zero": "-0.0",
}
MISSING = "@missing"
ODD = (
    *(None, True, 0, -1, 2**63, 2**64, 1e308, 0.5),
    *("", "\x00", "\ud800", "\x1b[31m\r\n", "a" * 300, LONG),
    *([], {}, [[]], [None], {"a": None}, {"type": "x"}, [{"type": "\ud800"}]),
    *(["\ud800"], {"\ud800": "\ud800"}, {"$ref": "#"}, SCHEMA_IN_ITSELF),
    *RAW,
)

CHAT = {
    **SAMPLED,
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "a"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ],
    "tools": [{"type": "function", "function": {**TOOL, "strict": True}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "max_tokens": 3,
    "seed": 3,
    "n": 2,
    "stop": ["z"],
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1.0},
    "cache_salt": "x",
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "stream": True,
    "stream_options": {"include_usage": True},
}
STRUCTURED_CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_completion_tokens": 3,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "a", "strict": True, "schema": PARAMETERS},
    },
}
RESPONSE = {
    **SAMPLED,
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "hi"}],
            "id": "m",
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [{"type": "summary_text", "text": "x"}],
            "content": [{"type": "reasoning_text", "text": "y"}],
        },
    ],
    "instructions": "i",
    "store": True,
    "max_output_tokens": 3,
    "tools": [FLAT_TOOL],
    "tool_choice": {"type": "function", "name": "f"},
    "parallel_tool_calls": True,
    "metadata": {"a": "b"},
    "user": "u",
    "stream": True,
    "include": [],
    "reasoning": {"effort": "none", "summary": "auto"},
}
NEXT_RESPONSE = {
    "model": "tiny",
    "input": "hi",
    "previous_response_id": PREVIOUS,
    "max_output_tokens": 3,
    "text": {
        "format": {"type": "json_schema", "name": "x", "schema": PARAMETERS, "strict": True},
        "verbosity": "low",
    },
    "background": False,
    "truncation": "disabled",
    "prompt_cache_key": "p",
}
MESSAGE = {
    **SAMPLED,
    "max_tokens": 3,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "t"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "r"}],
                    "is_error": False,
                }
            ],
        },
    ],
    "tools": [CLAUDE_TOOL],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "top_k": 5,
    "stop_sequences": ["z"],
    "metadata": {"user_id": "u"},
    "stream": True,
    "thinking": {"type": "disabled"},
}
COUNTED = {
    "model": "tiny",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "system": "s",
    "tools": [CLAUDE_TOOL],
    "tool_choice": {"type": "any"},
}
FILLED_IN = {
    **SAMPLED,
    "prompt": ["a", "b"],
    "suffix": "z",
    "max_tokens": 3,
    "n": 2,
    "echo": True,
    "stop": ["x"],
    "logit_bias": {"3": -1},
    "user": "u",
}
EMBEDDED = {
    "model": "tiny",
    "input": ["ab", "c"],
    "encoding_format": "base64",
    "dimensions": 8,
    "truncate_prompt_tokens": 4,
    "user": "u",
}
RERANKED = {
    "model": "tiny",
    "query": "a",
    "documents": ["b", "c"],
    "top_n": 1,
    "return_documents": True,
    "truncate_prompt_tokens": 4,
}

GENERATING = (
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", STRUCTURED_CHAT),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", NEXT_RESPONSE),
    ("/v1/messages", MESSAGE),
    ("/v1/messages/count_tokens", COUNTED),
    ("/v1/completions", FILLED_IN),
)
POOLING = (
    ("/v1/embeddings", EMBEDDED),
    ("/v1/embeddings", {"model": "tiny", "input": [[4, 5], [6]]}),
    ("/pooling", {"model": "tiny", "input": "ab", "encoding_format": "float"}),
    ("/v1/score", {"model": "tiny", "text_1": "a", "text_2": ["b", "c"], "truncate_prompt_tokens": 4}),
    ("/v1/rerank", RERANKED),
)


def mutations(body):
    """The path, and the bytes of the body with an odd value there, or without it: one for each path."""
    dice = random.Random(0)
    for path in _paths(body):
        is_optional = bool(path) and isinstance(path[-1], str)
        values = [*ODD, *([MISSING] if is_optional else [])]
        yield path, encoded(_replaced(body, path, dice.sample(values, 1)[0]))


def encoded(body):
    """The JSON, with what replaces a stand-in."""
    text = json.dumps(body)
    for stand_in, raw in RAW.items():
        text = text.replace(json.dumps(stand_in), raw)
    return text.encode()


def _paths(value, path=()):
    yield path
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, entry in entries:
        yield from _paths(entry, (*path, key))


def _replaced(body, path, value):
    """A copy with another value there."""
    if not path:
        return value
    copy = dict(body) if isinstance(body, dict) else list(body)
    if value is MISSING and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = _replaced(copy[path[0]], path[1:], value)
    return copy
