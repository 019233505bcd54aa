"""What requests may hold, field by field, with the parsers' own bounds.

Called by `openapi`. A field that a parser takes and this does not name fails a contract test, and so does a
bound that differs. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire_server.api import calls, chat_messages, generation_fields, grammar_fields, sampling_fields
from quire_server.api.fields import INT64
from quire_server.api.json_schema import (
    Schema,
    any_of,
    array,
    boolean,
    closed,
    integer,
    number,
    one_of,
    optional_array,
    positive,
    text,
    token_id,
)
from quire_server.api.reply import MAX_BODY_BYTES
from quire_server.api.sampling_defaults import SamplingDefaults
from quire_server.core.policy import CLASSES, MAX_PRIORITY, MIN_PRIORITY

_NEUTRAL = "Known, but not implemented: only values that ask for nothing are accepted."


def chat(models: Sequence[str], vocab_size: int | None, defaults: SamplingDefaults) -> Schema:
    """The body of /v1/chat/completions."""
    own: dict[str, Schema] = {
        "messages": array(_message(), 1, chat_messages.MAX_MESSAGES)
        | {"description": "The conversation so far. Text only."},
        "max_completion_tokens": integer("The longest answer, in tokens.", 1, INT64),
        "max_tokens": integer("The same by its older name.", 1, INT64),
        "logprobs": boolean("Whether to tell the log-probability of each token.", default=False),
        "top_logprobs": integer(
            "How many of the likeliest tokens to tell at each place; needs `logprobs`.",
            0,
            sampling_fields.MAX_LOGPROBS,
        ),
    }
    common = _common(models, vocab_size, defaults)
    return closed(own | common | _neutral(calls.NEUTRAL_CHAT), ["model", "messages"])


def completion(models: Sequence[str], vocab_size: int | None, defaults: SamplingDefaults) -> Schema:
    """The body of /v1/completions."""
    ids = {"type": "array", "items": token_id(vocab_size), "minItems": 1}
    own: dict[str, Schema] = {
        "prompt": {
            "anyOf": [
                {"type": "string"},
                ids,
                array({"anyOf": [{"type": "string"}, ids]}, 1, calls.MAX_CHOICES),
            ],
            "description": "A text, a list of token ids, or a list of either. "
            f"Prompts times `n` are at most {calls.MAX_CHOICES}.",
        },
        "echo": boolean("Whether the answer begins with the prompt.", default=False),
        "logprobs": integer(
            "How many of the likeliest tokens to tell at each place.", 0, sampling_fields.MAX_LOGPROBS
        ),
        "max_tokens": integer(
            "The longest answer, in tokens; 0 only with `echo`.", 0, INT64, calls.COMPLETION_MAX_TOKENS
        ),
    }
    common = _common(models, vocab_size, defaults)
    return closed(own | common | _neutral(calls.NEUTRAL_COMPLETION), ["model", "prompt"])


def tokenize(models: Sequence[str]) -> Schema:
    """The body of /tokenize."""
    model = _model(models, nullable=True)
    prompt: Schema = {"type": "string", "description": "A text."}
    special = boolean("Whether to add what the tokenizer puts around a text.", default=True)
    messages = array(_message(), 1, chat_messages.MAX_MESSAGES) | {"description": "Or a conversation."}
    return {
        "anyOf": [
            closed({"model": model, "prompt": prompt, "add_special_tokens": special}, ["prompt"]),
            closed({"model": model, "messages": messages}, ["messages"]),
        ]
    }


def detokenize(models: Sequence[str], vocab_size: int | None) -> Schema:
    """The body of /detokenize."""
    tokens = array(token_id(vocab_size), 0, MAX_BODY_BYTES) | {"description": "Token ids of the model."}
    return closed({"model": _model(models, nullable=True), "tokens": tokens}, ["tokens"])


def _common(models: Sequence[str], vocab_size: int | None, defaults: SamplingDefaults) -> dict[str, Schema]:
    return {"model": _model(models)} | _delivery() | _choice(defaults) | _bounds_of_text(vocab_size) | _form()


def _model(models: Sequence[str], *, nullable: bool = False) -> Schema:
    if models:
        return {"enum": [*models, *([None] if nullable else [])], "description": "A name from /v1/models."}
    kind = ["string", "null"] if nullable else "string"
    return {"type": kind, "maxLength": 256, "description": "A name from /v1/models."}


def _delivery() -> dict[str, Schema]:
    name = generation_fields.MAX_NAME
    ttl = one_of("How long it is kept.", list(generation_fields.CACHE_TTLS), "5m")
    control = closed({"type": {"const": "ephemeral"}, "ttl": ttl}, ["type"])
    usage = boolean("Whether the stream ends with token counts.", default=False)
    continuous = boolean("Whether every chunk has the token counts so far, too.", default=False)
    options = closed(
        {
            "include_usage": usage,
            "continuous_usage_stats": continuous,
            "include_obfuscation": one_of(_NEUTRAL, [False]),
        }
    )
    level = {"type": "integer", "minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY}
    return {
        "n": integer("How many answers.", 1, generation_fields.MAX_N, 1),
        "stream": boolean("Whether to send the answer piece by piece.", default=False),
        "stream_options": any_of("Only with `stream`.", options),
        "user": text("For the client's own records.", name),
        "cache_salt": text("Prefixes are shared only between requests of equal salt.", name),
        "cache_control": any_of("Keep the prompt in the prefix cache.", control),
        "priority": any_of(
            "Lower goes first; needs `--scheduling-policy priority`.", {"enum": list(CLASSES)}, level
        ),
        "timeout": positive("Seconds from arrival to the last token.", generation_fields.MAX_TIMEOUT),
        "retry_on_timeout": boolean(
            "Whether to try once more, for half of the tokens, if the time ends before anything is sent.",
            default=False,
        ),
    }


def _choice(defaults: SamplingDefaults) -> dict[str, Schema]:
    penalty = sampling_fields.MAX_PENALTY
    return {
        "temperature": number("0 takes the likeliest token.", 0, 2, defaults.temperature),
        "top_p": positive("Only the likeliest tokens that together have this share.", 1, defaults.top_p),
        "top_k": integer("Only so many of the likeliest tokens; 0 and -1: all.", -1, INT64, defaults.top_k),
        "min_p": number("Only tokens with this share of the likeliest one's.", 0, 1, defaults.min_p),
        "seed": integer("The same seed gives the same answer, whatever the batch.", -INT64, INT64 - 1),
        "presence_penalty": number("Against tokens that the answer has.", -penalty, penalty, 0.0),
        "frequency_penalty": number("The same, by how often.", -penalty, penalty, 0.0),
        "repetition_penalty": number(
            "Divides the scores of tokens that prompt or answer have.",
            sampling_fields.MIN_REPETITION_PENALTY,
            sampling_fields.MAX_REPETITION_PENALTY,
            defaults.repetition_penalty,
        ),
        "watermark": boolean("Whether the answer gets a watermark; needs `--watermark`."),
    }


def _bounds_of_text(vocab_size: int | None) -> dict[str, Schema]:
    token = token_id(vocab_size)
    strings, length = generation_fields.MAX_STRINGS, generation_fields.MAX_STRING_LENGTH
    string: Schema = {"type": "string", "minLength": 1, "maxLength": length}
    word = string | {"pattern": r"\S"}
    bias = sampling_fields.MAX_BIAS
    biases = {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -bias, "maximum": bias},
        "maxProperties": sampling_fields.MAX_LOGIT_BIAS,
        "description": "By token id, what is added to its score.",
    }
    return {
        "logit_bias": biases,
        "allowed_token_ids": optional_array(
            "Only these tokens.", token, 1, sampling_fields.MAX_ALLOWED_TOKENS
        ),
        "stop": any_of("Strings that end the answer.", string, array(string, 0, strings)),
        "stop_token_ids": optional_array(
            "Tokens that end the answer.", token, 0, sampling_fields.MAX_STOP_TOKENS
        ),
        "bad_words": any_of("What the answer shall not contain.", word, array(word, 0, strings)),
        "ignore_eos": boolean("Whether the model's own end does not count.", default=False),
        "min_tokens": integer("The shortest answer, in tokens.", 0, INT64, 0),
        "include_stop_str_in_output": boolean("Whether what ended it is a part of it.", default=False),
        "skip_special_tokens": boolean("Whether special tokens are left out of the text.", default=True),
        "prompt_logprobs": integer(
            "How many of the likeliest tokens to tell at each place of the prompt.",
            0,
            sampling_fields.MAX_LOGPROBS,
        ),
    }


def _form() -> dict[str, Schema]:
    schema: Schema = {"type": "object", "description": "A JSON schema."}
    described = closed(
        {
            "name": {"type": "string", "pattern": f"^{grammar_fields.NAME.pattern}$"},
            "description": text("For readers.", grammar_fields.MAX_DESCRIPTION),
            "strict": boolean("Changes nothing: an answer always follows the schema.", default=False),
            "schema": schema,
        },
        ["name", "schema"],
    )
    formats = (
        closed({"type": {"enum": ["text", "json_object"]}}, ["type"]),
        closed({"type": {"const": "json_schema"}, "json_schema": described}, ["type", "json_schema"]),
    )
    string: Schema = {"type": "string"}
    choices = array(string, 1, grammar_fields.MAX_CHOICES)
    asked: dict[str, Schema] = {
        "json": {"anyOf": [schema, string]},
        "regex": string,
        "choice": choices,
        "grammar": string,
        "json_object": {"const": True},
    }
    outputs = (closed({name: asked[name]}, [name]) for name in grammar_fields.KINDS)
    return {
        "response_format": any_of("What the answer has to look like.", *formats),
        "structured_outputs": any_of("The same in vLLM's words; one of them.", *outputs),
    }


def _message() -> Schema:
    part: Schema = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    }
    content: Schema = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": part}],
        "description": "Text.",
    }
    role: Schema = {"enum": list(chat_messages.ROLES), "description": "Who speaks."}
    return closed(
        {
            "role": role,
            "content": content,
            "name": text("Who of them.", chat_messages.MAX_NAME),
            "tool_calls": one_of(_NEUTRAL, [[]]),
            "annotations": one_of(_NEUTRAL, [[]]),
        },
        ["role", "content"],
    )


def _neutral(values: Mapping[str, Sequence[object]]) -> dict[str, Schema]:
    return {name: one_of(_NEUTRAL, allowed) for name, allowed in values.items()}
