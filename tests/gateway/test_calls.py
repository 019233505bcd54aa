"""What is read of a request to route it; the engine judges all else."""

import json

import pytest

from quire_gateway.openai.calls import CHAT, COMPLETIONS, Call, read
from quire_http.errors import ApiError


def call_of(body, path=CHAT):
    return read(path, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("path", "body", "call"),
    [
        (
            CHAT,
            {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]},
            Call("m", prompt=("system", "Be short.", "user", "Hi")),
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]},
            Call("m", prompt=("user", "a", "b")),
        ),
        (CHAT, {"stream": True, "max_tokens": 7}, Call("m", stream=True, max_tokens=7)),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 8}, Call("m", max_tokens=8)),
        (COMPLETIONS, {"prompt": "Once"}, Call("m", prompt=("Once",))),
        (COMPLETIONS, {"prompt": ["a", "b"]}, Call("m", prompt=("a", "b"))),
        (COMPLETIONS, {"prompt": [1, 2]}, Call("m", prompt=("[1,2]",))),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, Call("m", prompt=("[1,2]", "[3]"))),
    ],
)
def test_a_request_is_read_as_far_as_it_is_routed_by(path, body, call):
    assert call_of({"model": "m", **body}, path) == call


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "no list"},
        {"messages": [1, None, {"content": {"text": 1}}]},
        {"prompt": {"a": [None]}, "max_tokens": "many", "stream": "yes"},
    ],
)
def test_what_the_engine_will_refuse_is_routed_all_the_same(body):
    for path in (CHAT, COMPLETIONS):
        call = call_of({"model": "m", **body}, path)
        assert (call.model, call.stream, call.max_tokens) == ("m", False, None)


@pytest.mark.parametrize(
    ("body", "param"),
    [(b"{", None), (b"[]", None), (b"{}", "model"), (b'{"model": 1}', "model"), (b"\xff", None)],
)
def test_what_cannot_be_routed_is_refused(body, param):
    with pytest.raises(ApiError) as refused:
        read(CHAT, body)
    assert refused.value.status == 400
    assert refused.value.body["error"]["param"] == param
