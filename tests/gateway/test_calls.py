"""What is read of a request to route it; the engine judges all else."""

import json

import pytest

from quire_gateway.openai.calls import EMBEDDINGS, RERANK, Call, read, with_half_the_tokens, with_model
from quire_http.dialects import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES
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
        (COMPLETIONS, {"prompt": "Once", "suffix": "end."}, Call("m", prompt=("Once", "end."))),
        (
            MESSAGES,
            {
                "system": [{"type": "text", "text": "Be short."}],
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": [{"type": "tool_use", "input": {}}]},
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "content": "Rain.",
                                "cache_control": {"type": "ephemeral"},
                            },
                            {"type": "tool_result", "content": [{"type": "text", "text": "Sun."}]},
                        ],
                    },
                ],
                "metadata": {"user_id": "me"},
                "max_tokens": 7,
            },
            Call(
                "m",
                max_tokens=7,
                prompt=("system", "Be short.", "user", "Hi", "assistant", "user", "Rain.", "Sun."),
                user="me",
                pins_cache=True,
            ),
        ),
        (
            RESPONSES,
            {
                "instructions": "Be short.",
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                    {"type": "function_call_output", "output": "Rain."},
                ],
                "previous_response_id": "resp_0123456789ab_77",
                "prompt_cache_key": "me",
                "temperature": 0,
                "max_output_tokens": 7,
            },
            Call(
                "m",
                max_tokens=7,
                prompt=("system", "Be short.", "user", "Hi", "function_call_output", "Rain."),
                user="me",
                kept_by="0123456789ab",
            ),
        ),
        (RESPONSES, {"input": "Hi"}, Call("m", prompt=("user", "Hi"))),
        (RESPONSES, {"previous_response_id": "x"}, Call("m", kept_by="")),
        (
            COUNT_TOKENS,
            {"messages": [{"role": "user", "content": "Hi"}]},
            Call("m", prompt=("user", "Hi"), generates=False),
        ),
        (COMPLETIONS, {"prompt": ["a", "b"]}, Call("m", num_answers=2, prompt=("a", "b"))),
        (COMPLETIONS, {"prompt": [1, 2]}, Call("m", prompt=("[1,2]",), num_token_ids=2)),
        (
            COMPLETIONS,
            {"prompt": [[1, 2], [3]]},
            Call("m", num_answers=2, prompt=("[1,2]", "[3]"), num_token_ids=3),
        ),
        (
            EMBEDDINGS,
            {"input": ["a", [1, 2]], "user": "u", "max_tokens": 9},
            Call("m", max_tokens=0, prompt=("a", "[1,2]"), num_token_ids=2, user="u", has_answer=False),
        ),
        (
            RERANK,
            {"query": "q", "documents": ["a", {"text": "b"}]},
            Call("m", max_tokens=0, prompt=("q", "a", "b"), has_answer=False),
        ),
    ],
)
def test_a_request_is_read_as_far_as_it_is_routed_by(path, body, call):
    assert call_of({"model": "m", **body}, path) == call


def nested(depth):
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize("change", [with_half_the_tokens, lambda body: with_model(body, "m", "served")])
def test_a_body_that_is_nested_too_deep_to_be_changed_is_refused(change):
    deep = b'{"max_tokens": 8, "\\u006dodel": "m", "a": %b}' % (b"[" * 900 + b"]" * 900)
    with pytest.raises(ApiError) as refused:
        change(deep)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "no list"},
        {"messages": [1, None, {"content": {"text": 1}}]},
        {"prompt": {"a": [None]}, "max_tokens": "many", "stream": "yes"},
        {"prompt": nested(900)},
        {"messages": [{"role": nested(900), "content": "x"}]},
        {"prompt": [1, nested(900)]},
        {"prompt": ["a", nested(900)], "messages": [{"content": nested(900)}]},
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


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_part_has_parts_of_its_own_and_no_deeper_ones(path):
    def within(levels):
        return "x" if not levels else [{"content": within(levels - 1)}]

    for levels in (1, 2):
        assert call_of({"model": "m", "messages": [{"content": within(levels)}]}, path).prompt[1:] == ("x",)
    for levels in (3, 400):
        assert not call_of({"model": "m", "messages": [{"content": within(levels)}]}, path).prompt[1:]
