"""What routing needs of a request: model, prompt, user and salt, whether it streams, how long it may be.

The body itself goes to the replica as it came, so that a field is never lost for being unknown here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import orjson

from quire_http.dialects import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES
from quire_http.errors import ApiError, bad_field

EMBEDDINGS, POOLING, RERANK, SCORE = "/v1/embeddings", "/pooling", "/v1/rerank", "/v1/score"
#: By path of a model that embeds texts: the fields with its texts. Their answers have no text.
_POOLED = {
    EMBEDDINGS: ("input",),
    POOLING: ("input",),
    RERANK: ("query", "documents"),
    SCORE: ("text_1", "text_2"),
}
#: The paths that are relayed.
PATHS = (CHAT, COMPLETIONS, MESSAGES, COUNT_TOKENS, RESPONSES, *_POOLED)
#: Those of OpenAI's completions: external backends have them, and replicas can go on with their streams.
COMPLETION_PATHS = (CHAT, COMPLETIONS)
#: Those whose usage has input and output tokens instead of a prompt's and a completion's.
INPUT_OUTPUT_PATHS = (MESSAGES, COUNT_TOKENS, RESPONSES)
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_KEPT = re.compile(r"resp_([0-9a-f]{12})_[0-9a-f]+")
_MODEL_KEY = re.compile(rb'"model"\s*:')
_ESCAPED_LETTER = b"\\u006"  # with which each letter of `model` can be written
_BYTES_PER_TOKEN = 4  # of English text, about
_ANSWER_TOKENS = 256  # of one whose length is not limited by its request
_MOST_TOKENS = 1 << 24  # more than any replica generates


@dataclass(frozen=True, slots=True)
class Call:
    """One request, as far as it is routed by."""

    model: str
    stream: bool = False
    max_tokens: int | None = None
    num_answers: int = 1
    has_tools: bool = False
    is_exact: bool = False  # every replica has the same answer, token by token, and can go on with it
    prompt: tuple[str, ...] = ()  # its parts in their order; a message is its role and its text
    num_token_ids: int = 0  # of prompts that are given as these
    user: str = ""
    cache_salt: str = ""
    #: By the route's classifier, which is asked after the rest was read.
    request_class: str = ""
    #: How many of these parts there are up to the first message of the user; None: all are.
    num_opening: int | None = field(default=None, compare=False)
    pins_cache: bool = False  # its prompt is kept in the replica's cache when it is over
    generates: bool = True  # else its prompt is counted, and takes nothing
    has_answer: bool = True  # in text; False: vectors or scores, for which no prefix is cached
    kept_by: str | None = None  # the hint of the one replica that has what it goes on with; "": none has

    @property
    def opening(self) -> tuple[str, ...]:
        """What a conversation begins with, which its later requests begin with as well."""
        return self.prompt[: self.num_opening]


def read(path: str, body: bytes | bytearray) -> Call:
    """The call of a body. Raises ApiError where it cannot be routed."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ApiError(400, "The body must be a JSON object.")
    model = document.get("model")
    if model is None:
        raise bad_field("model", "is required")
    if not isinstance(model, str):
        raise bad_field("model", "must be a string")
    if path in _POOLED:
        return _pooled(model, document, _POOLED[path])
    limits = _max_tokens(document), _num_answers(document)
    has_tools = bool(document.get("tools") or document.get("functions"))
    common = (model, document.get("stream") is True, *limits, has_tools, _is_exact(document))
    user, salt = _text(document.get("user")), _text(document.get("cache_salt"))
    pins = document.get("cache_control") is not None
    if path in (MESSAGES, COUNT_TOKENS):
        prompt, num_opening = _conversation(document)
        return Call(
            *common,
            prompt,
            0,
            _user_id(document),
            salt,
            num_opening=num_opening,
            pins_cache=b'"cache_control"' in body,
            generates=path == MESSAGES,
        )
    if path == RESPONSES:
        prompt, num_opening = _items(document)
        user = _text(document.get("prompt_cache_key")) or user
        earlier = document.get("previous_response_id")
        kept_by = keeper(earlier) if isinstance(earlier, str) and earlier else None
        common = (*common[:-1], False)  # each has an id of its own, by which it is kept
        return Call(*common, prompt, 0, user, salt, num_opening=num_opening, kept_by=kept_by)
    if path != CHAT:
        prompts = document.get("prompt")
        suffix = _text(document.get("suffix"))  # of each prompt
        texts = (*_texts(prompts), *([suffix] if suffix else []))
        return Call(*common, texts, _num_token_ids(prompts), user, salt, pins_cache=pins)
    prompt, num_opening = _chat(document)
    return Call(*common, prompt, 0, user, salt, num_opening=num_opening, pins_cache=pins)


def keeper(response_id: str) -> str:
    """The hint of the replica that keeps a response, empty where the id is none of a replica's."""
    found = _KEPT.fullmatch(response_id)
    return "" if found is None else found[1]


def _items(document: dict[str, Any]) -> tuple[tuple[str, ...], int | None]:
    """As `_chat`, of the items of a response, or of one text; the instructions stand before them."""
    given, system = document.get("input"), _text(document.get("instructions"))
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [
        {"role": one.get("role", one.get("type")), "content": one.get("content", one.get("output"))}
        for one in (items if isinstance(items, list) else ())
        if isinstance(one, dict)
    ]
    return _conversation({"system": system or None, "messages": messages})


def _user_id(document: dict[str, Any]) -> str:
    """Anthropic's name of the user."""
    metadata = document.get("metadata")
    return _text(metadata.get("user_id")) if isinstance(metadata, dict) else ""


def _conversation(document: dict[str, Any]) -> tuple[tuple[str, ...], int | None]:
    """As `_chat`, of Anthropic's blocks; what stands before the messages is the system's."""
    system = tuple(_texts(document.get("system")))
    before = ("system", *system) if system else ()
    prompt, num_opening = _chat(document)
    return (*before, *prompt), None if num_opening is None else len(before) + num_opening


def estimated_tokens(call: Call) -> int:
    """Tokens of the prompts, of texts by their bytes."""
    return (
        call.num_token_ids or len("".join(call.prompt).encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN
    )


def longest_answers(call: Call, context_length: int | None = None) -> int:
    """Tokens that its answers may have together. ``context_length``: of what answers, where it is known."""
    if not call.generates:
        return 0
    each = _ANSWER_TOKENS if call.max_tokens is None else max(call.max_tokens, 0)
    each = each if context_length is None else min(each, context_length)
    return min(each * call.num_answers, _MOST_TOKENS)


def with_model(body: bytes | bytearray, asked: str, served: str) -> bytes | bytearray:
    """The body with another name of the model; nothing else of it changes, if the name stands there once."""
    if len(_MODEL_KEY.findall(body)) > 1 or _ESCAPED_LETTER in body:
        return with_fields(body, model=served)
    field = rb'("model"\s*:\s*)' + re.escape(orjson.dumps(asked))
    changed, times = re.subn(field, lambda match: match[1] + orjson.dumps(served), body)
    return changed if times == 1 else with_fields(body, model=served)


def with_fields(body: bytes | bytearray, **fields: object) -> bytes:
    """The body with these fields. Raises ApiError where it is nested too deep to be written."""
    return written({**orjson.loads(body), **fields})


def written(document: dict[str, Any]) -> bytes:
    """A body that was read, as JSON again. Raises ApiError where it is nested too deep to be written."""
    try:
        return orjson.dumps(document)
    except TypeError as error:  # what was read can be written, but for this
        raise ApiError(400, f"The body cannot be changed: {error}") from None


def wants_usage(body: bytes | bytearray) -> bool:
    """Whether the stream of this request ends with a usage."""
    options = orjson.loads(body).get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def num_answers(body: bytes | bytearray) -> int:
    """The answers that this request asks for."""
    return _num_answers(orjson.loads(body))


def with_half_the_tokens(body: bytes | bytearray) -> bytes | None:
    """The body with half of its limit of tokens; None where it has none that can be halved."""
    document = orjson.loads(body)
    for name in _LIMITS:
        if type(value := document.get(name)) is int and value > 1:
            return with_fields(body, **{name: value // 2})
    return None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _max_tokens(document: dict[str, Any]) -> int | None:
    for name in _LIMITS:
        if type(value := document.get(name)) is int:
            return value
    return None


def _num_answers(document: dict[str, Any]) -> int:
    """Those of each prompt together."""
    value, prompt = document.get("n"), document.get("prompt")
    each = value if type(value) is int and value > 0 else 1
    return each * len(prompt) if _is_list_of_prompts(prompt) else each


def _is_list_of_prompts(prompt: object) -> TypeGuard[list[Any]]:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


def _num_token_ids(prompt: object) -> int:
    if _is_list_of_prompts(prompt):
        return sum(len(one) for one in prompt if isinstance(one, list))
    return len(prompt) if isinstance(prompt, list) else 0


def _is_exact(document: dict[str, Any]) -> bool:
    temperature, logprobs = document.get("temperature"), document.get("logprobs")
    is_greedy = type(temperature) in (int, float) and temperature == 0
    if not is_greedy and type(document.get("seed")) is not int:
        return False
    has_logprobs = type(logprobs) is int or bool(logprobs)  # of a completion 0 asks for those of its tokens
    return not (has_logprobs or document.get("resume") or _num_answers(document) > 1)


def _pooled(model: str, document: dict[str, Any], fields: tuple[str, ...]) -> Call:
    """The call of a path whose answer has no text: all that it takes are its inputs."""
    inputs = [document.get(name) for name in fields]
    return Call(
        model,
        max_tokens=0,
        prompt=tuple(text for one in inputs for text in _texts(one)),
        num_token_ids=sum(map(_num_token_ids, inputs)),
        user=_text(document.get("user")),
        has_answer=False,
    )


def _chat(document: dict[str, Any]) -> tuple[tuple[str, ...], int | None]:
    """The parts of the prompt, and how many of them there are up to the first message of the user."""
    parts: list[str] = []
    num_opening: int | None = None
    messages = document.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            parts.append(role := _text(message.get("role")))
            content = message.get("content")
            parts += (content,) if isinstance(content, str) else _texts(content)
            if role == "user" and num_opening is None:
                num_opening = len(parts)
    return tuple(parts), num_opening


def _texts(content: object, levels: int = 1) -> Iterator[str]:
    """The texts of a content: a text, parts with texts, or token ids, which stay as they are written.
    ``levels``: that a part may have of parts.
    """
    for part in content if _is_list_of_prompts(content) else (content,):
        text = part.get("text", part.get("content")) if isinstance(part, dict) else part
        if isinstance(part, dict) and isinstance(text, list):
            if levels:
                yield from _texts(text, levels - 1)  # of the result of a tool
        elif isinstance(text, str):
            yield text
        elif isinstance(text, list) and text and set(map(type, text)) <= {int}:
            yield orjson.dumps(text).decode()
