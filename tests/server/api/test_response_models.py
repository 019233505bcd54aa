"""What the server writes fits the models of `api.protocol.responses`, from which /openapi.json derives: every
required field is there, of the declared type, and no other field.
"""

import json

import httpx
import pytest

from quire_server.api.protocol.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Error,
    Health,
    Model,
    Models,
    Text,
    Tokens,
    Version,
)
from tests.server.conftest import KEY
from tests.server.launch import NO_TLS

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TEXT = ("/v1/completions", {"prompt": "hi"})
BOTH = ({}, {"n": 2}, {"allowed_token_ids": [65], "stop_token_ids": [65]}, {"max_tokens": 1})
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"additionalProperties": False}}}
CALLED = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "ignore_eos": False}
REQUESTS = [
    (*CHAT, CALLED),
    (*CHAT, {**CALLED, "logprobs": True, "n": 2}),
    *((*CHAT, more) for more in BOTH),
    (*CHAT, {"logprobs": True}),
    (*CHAT, {"logprobs": True, "top_logprobs": 3, "n": 2}),
    (*TEXT, {"prompt_logprobs": 2}),
    (*CHAT, {"prompt_logprobs": 2}),
    *((*TEXT, more) for more in BOTH),
    (*TEXT, {"logprobs": 0}),
    (*TEXT, {"logprobs": 3, "n": 2}),
    (*TEXT, {"echo": True, "n": 2}),
    (*TEXT, {"echo": True, "logprobs": 2}),
    (*TEXT, {"echo": True, "logprobs": 2, "max_tokens": 0}),
    (*TEXT, {"prompt": [[1, 2], [3]], "logprobs": 1}),
]
OPTIONS = ({}, {"include_usage": True}, {"continuous_usage_stats": True}, {"include_usage": False})


def post(server, path, body, *, timed=False):
    headers = {"authorization": f"Bearer {KEY}", "x-quire-token-timing": str(timed).lower()}
    response = httpx.post(
        server.url + path,
        json={"model": "tiny", "max_tokens": 6, "ignore_eos": True} | body,
        headers=headers,
        timeout=60,
        verify=NO_TLS,
    )
    assert response.is_success, response.text
    return response


def events(response):
    """The data of each event but the last, which is [DONE]."""
    *data, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [event.removeprefix("data: ") for event in data]


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize(("path", "body", "more"), REQUESTS)
def test_a_full_response_fits_its_model(server, path, body, more, timed):
    answer = post(server, path, body | more, timed=timed)
    model = ChatCompletion if path == CHAT[0] else Completion
    parsed = model.model_validate_json(answer.content)
    assert parsed.model_dump(mode="json", exclude_unset=True) == answer.json()
    assert (parsed.choices[0].quire_timing is not None) == (timed and more.get("max_tokens") != 0)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("path", "body", "more"),
    [
        one
        for one in REQUESTS
        if "prompt_logprobs" not in one[2] and not ("echo" in one[2] and "logprobs" in one[2])
    ],
)
def test_every_chunk_of_a_stream_fits_its_model(server, path, body, more, options, timed):
    stream = {"stream": True, "stream_options": options}
    chunks = events(post(server, path, body | more | stream, timed=timed))
    model = ChatCompletionChunk if path == CHAT[0] else CompletionChunk
    parsed = [model.model_validate_json(chunk) for chunk in chunks]
    assert [one.model_dump(mode="json", exclude_unset=True) for one in parsed] == [*map(json.loads, chunks)]
    with_usage = options.get("include_usage") or options.get("continuous_usage_stats")
    assert (parsed[-1].usage is not None) == bool(with_usage)


@pytest.mark.parametrize(
    ("method", "path", "body", "model"),
    [
        ("GET", "/v1/models", None, Models),
        ("GET", "/v1/models/tiny", None, Model),
        ("GET", "/v1/models/nothing", None, Error),
        ("GET", "/version", None, Version),
        ("GET", "/health", None, Health),
        ("GET", "/health?deep=true", None, Health),
        ("GET", "/nothing", None, Error),
        ("PUT", "/version", None, Error),
        ("POST", "/tokenize", {"prompt": "hi"}, Tokens),
        ("POST", "/detokenize", {"tokens": [1, 2]}, Text),
        ("POST", "/v1/completions", {"model": "tiny"}, Error),
    ],
)
def test_every_other_body_fits_its_model(server, method, path, body, model):
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.request(method, server.url + path, json=body, headers=headers, timeout=60, verify=NO_TLS)
    assert model.model_validate_json(answer.content).model_dump(mode="json") == answer.json()
