"""Requests: what is accepted, what is refused, and that the refusal names the field."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_http.errors import ApiError
from quire_http.exchange import to_json
from quire_server.api.message_formatter import _whole
from quire_server.api.output_pieces import CALL as CALL_PIECE
from quire_server.api.output_pieces import Piece
from quire_server.api.protocol.openai_responses import parse_responses
from quire_server.api.protocol.requests import (
    DetokenizeRequest,
    TokenizeRequest,
    parse_chat,
    parse_completion,
)
from quire_server.api.protocol.validation import parse_object, validate
from quire_server.api.response_items import encoded
from quire_server.core.sampling_params import SamplingParams
from quire_server.model_dir.generation_config import SamplingDefaults
from tests.examples import examples

VOCAB = 100
PLAIN = SamplingDefaults()
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def chat(defaults=PLAIN, **fields):
    return parse_chat({**CHAT, **fields}, defaults, VOCAB)


def completion(**fields):
    return parse_completion({**COMPLETION, **fields}, SamplingDefaults(), VOCAB)


def test_a_bare_chat_takes_the_model_s_defaults():
    model = SamplingParams(0, temperature=0.6, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.2)
    generation = chat(SamplingDefaults(model)).generation
    sampling = generation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 40)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert (generation.max_tokens, generation.n, generation.stream) == (None, 1, False)


def test_what_a_client_says_beats_the_defaults():
    model = SamplingDefaults(SamplingParams(0, temperature=0.6, top_p=0.9, top_k=40))
    sampling = chat(model, temperature=0, top_p=1, top_k=-1).generation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, 0)


def test_everything_that_real_clients_send_by_default_is_accepted():
    nulls = dict.fromkeys(
        ["logit_bias", "tools", "stop", "seed", "user", "stream_options", "response_format"]
    )
    chat(
        **nulls,
        frequency_penalty=0,
        presence_penalty=0.0,
        n=1,
        parallel_tool_calls=True,
        store=False,
    )


def test_an_answer_sent_back_as_openai_python_dumps_it_is_accepted():
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": None, "tool_calls": None}
    assert chat(messages=[answer]).messages == ({"role": "assistant", "content": "x"},)


def test_explicit_prompt_caching_lasts_five_minutes_unless_the_client_says_otherwise():
    def ttl(**control):
        return chat(cache_control={"type": "ephemeral", **control}).generation.cache_ttl

    assert (chat().generation.cache_ttl, ttl(), ttl(ttl="5m"), ttl(ttl="1h")) == (0.0, 300.0, 300.0, 3600.0)


@pytest.mark.parametrize(
    ("control", "field"),
    [
        ("ephemeral", "cache_control"),
        ({}, "cache_control.type"),
        ({"type": "persistent"}, "cache_control.type"),
        ({"type": "ephemeral", "ttl": "2d"}, "cache_control.ttl"),
        ({"type": "ephemeral", "ttl": 300}, "cache_control.ttl"),
        ({"type": "ephemeral", "scope": "all"}, "cache_control.scope"),
    ],
)
def test_a_wrong_cache_control_is_refused_by_name(control, field):
    with pytest.raises(ApiError) as caught:
        chat(cache_control=control)
    assert caught.value.body["error"]["param"] == field


def test_text_parts_are_joined_and_developers_are_systems():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts}, {"role": "user", "content": "u", "name": "bob"}]
    assert chat(messages=messages).messages == (
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "u", "name": "bob"},
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_a_prompt_is_text_or_token_ids_one_or_many(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 10**400),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.0),
        ("n", 0),
        ("n", 17),
        ("n", 2**63),
        ("n", 1e308),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**64),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", ["x" * 257]),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", list(range(65))),
        ("top_logprobs", 3),  # without logprobs
        ("logprobs", 1),
        ("stream", "true"),
        ("stream_options", {"include_usage": True}),  # without stream
        ("tools", "all"),
        ("tool_choice", "required"),
        ("best_of", 1),  # of the other route
        ("echo", False),
        ("guided_json", {}),
        ("model", ""),
        ("model", 5),
        ("messages", []),
        ("messages", "hi"),
        ("user", 5),
    ],
)
def test_a_bad_or_unsupported_value_is_a_400_that_names_the_field(field, value):
    with pytest.raises(ApiError) as refused:
        chat(**{field: value})
    assert refused.value.status == 400
    assert refused.value.body["error"]["param"] == field
    assert field in refused.value.body["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("prompt", [], "prompt"),
        ("prompt", [[]], "prompt"),
        ("prompt", [1, "a"], "prompt"),
        ("prompt", [VOCAB], "prompt"),
        ("prompt", ["a"] * 65, "prompt"),
        ("prompt", None, "prompt"),
        ("logprobs", True, "logprobs"),
        ("logprobs", 21, "logprobs"),
        ("max_tokens", 0, "max_tokens"),
        ("best_of", 2, "best_of"),
        ("suffix", 1, "suffix"),
        ("messages", [], "messages"),
    ],
)
def test_completions_refuse_by_name_too(field, value, param):
    with pytest.raises(ApiError) as refused:
        completion(**{field: value})
    assert refused.value.body["error"]["param"] == param


@pytest.mark.parametrize("number", ["1e400", "-1e400"])
def test_a_schema_with_a_number_that_cannot_be_written_again_is_refused_by_its_field(number):
    schema = parse_object(f'{{"type": "number", "maximum": {number}}}'.encode())
    tool = {"name": "f", "parameters": schema}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    asked = {"model": "m", "input": "a"}
    for param, refuse in (
        ("tools[0].function.parameters", lambda: chat(tools=[{"type": "function", "function": tool}])),
        (
            "tools[0].parameters",
            lambda: parse_responses({**asked, "tools": [{"type": "function", **tool}]}, 9),
        ),
        ("text.format.schema", lambda: parse_responses({**asked, "text": {"format": form}}, 9)),
        ("structured_outputs.json", lambda: chat(structured_outputs={"json": schema})),
    ):
        with pytest.raises(ApiError) as refused:
            refuse()
        assert refused.value.status == 400 and refused.value.body["error"]["param"] == param
        assert "too large, such as 1e400" in refused.value.body["error"]["message"]


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_nothing_is_sent_that_is_no_json(number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"score": number})


def test_a_suffix_counts_with_each_prompt():
    assert completion(prompt=["a" * 40] * 2, suffix="b" * 80, n=3).estimated_tokens == 3 * 2 * (10 + 20)


def test_no_request_asks_for_more_answers_than_the_limit():
    with pytest.raises(ApiError, match="n: 8 prompts times 16"):
        completion(prompt=["a"] * 8, n=16)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {}}}, "strict": True},
}


def test_calls_and_results_in_messages_are_as_templates_take_them():
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
    result = {"role": "tool", "content": "2", "tool_call_id": "1"}
    call = {**CALL, "function": {"name": "f", "arguments": {"a": 1}}}
    own = {**CALL, "index": 0, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}
    assert chat(messages=[{**answer, "tool_calls": [own], "parsed": None}]).messages[0]["tool_calls"] == [
        call
    ]
    cut = {**CALL, "function": {"name": "f", "arguments": '{"a": '}}
    assert chat(messages=[{**answer, "tool_calls": [cut]}]).messages[0]["tool_calls"] == [cut]
    assert chat(messages=[answer, result]).messages == (
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        result,
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "\\ud800"}',
        '{"a": NaN}',
        '{"a": 1e400}',
        "[1]",
        "[" * 100_000,
        '{"a": ' * 900 + "1" + "}" * 900,
        '{"a": ' + "9" * 5000 + "}",
    ],
)
def test_arguments_that_cannot_be_read_or_kept_are_shown_as_they_are(text):
    call = {**CALL, "function": {"name": "f", "arguments": text}}
    (message,) = chat(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}]).messages
    assert message["tool_calls"] == [call]
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": text}
    request = parse_responses({"model": "m", "input": [item]}, 10)
    _, conversation = request.to_call(PLAIN, 10, lambda _: None)
    assert json.loads(encoded(conversation))[0]["tool_calls"] == [call]
    piece = Piece(CALL_PIECE, text, "1", "f")
    assert _whole(piece, text)["input"] == {} and to_json(_whole(piece, text))


def test_the_choice_says_which_tools_may_be_called():
    named = {"type": "function", "function": {"name": "f"}}
    other = {"type": "function", "function": {"name": "g"}}
    two = [TOOL, other]
    assert chat(tools=two, tool_choice="none").tools is chat().tools is chat(tools=[]).tools is None
    auto, required, one = (chat(tools=two, tool_choice=c).tools for c in ("auto", "required", named))
    assert (auto.is_enforced, required.is_enforced, one.is_enforced) == (False, True, True)
    assert (set(auto.schemas), set(one.schemas)) == ({"f", "g"}, {"f"})
    assert len(one.tools) == 2, "the model sees all of them"
    assert (required.is_parallel, one.is_parallel) == (True, False)
    assert auto.schemas["f"]["type"] == "object"
    assert chat(tools=[other]).tools.is_strict is False and auto.is_strict


def test_a_tool_that_has_to_be_called_contradicts_an_expression_and_goes_with_a_schema():
    for choice in ("required", "auto"):  # the second is strict
        with pytest.raises(ApiError) as refused:
            chat(tools=[TOOL], tool_choice=choice, structured_outputs={"regex": "a"})
        assert refused.value.body["error"]["param"].startswith("structured_outputs")
        assert chat(tools=[TOOL], tool_choice=choice, response_format={"type": "json_object"}).tools


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("hi", "messages[0]"),
        ({"role": "alien", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "extra": 1}, "messages[0].extra"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_bad_message_is_named_by_its_place(message, where):
    with pytest.raises(ApiError) as refused:
        chat(messages=[message])
    assert refused.value.body["error"]["param"] == where


def test_the_two_names_of_max_tokens_may_not_contradict():
    assert chat(max_completion_tokens=5).generation.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).generation.max_tokens == 5
    with pytest.raises(ApiError, match="contradicts"):
        chat(max_completion_tokens=5, max_tokens=6)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"nonsense",
        b'{"a": NaN}',
        b"\xff",
        b'{"a": "\\ud800"}',
        b'{"a": "\xed\xa0\x80"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_is_a_400(body):
    with pytest.raises(ApiError) as refused:
        parse_object(body)
    assert refused.value.status == 400


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = (
    "model messages prompt n stop stop_token_ids logprobs top_logprobs seed temperature top_p top_k "
    "max_tokens min_tokens stream stream_options user echo tools cache_salt ignore_eos logit_bias "
    "priority timeout surprise cache_control min_p presence_penalty frequency_penalty repetition_penalty "
    "bad_words allowed_token_ids prompt_logprobs watermark include_stop_str_in_output skip_special_tokens"
)
names = st.sampled_from(NAMES.split(" "))


@given(st.dictionaries(names, junk, max_size=5), st.sampled_from([parse_chat, parse_completion]))
@settings(max_examples=examples(400), deadline=None)
def test_junk_in_any_field_is_parsed_or_refused_and_never_a_crash(fields, parse):
    base = CHAT if parse is parse_chat else COMPLETION
    try:
        parse({**base, **fields}, SamplingDefaults(), VOCAB)
    except ApiError as refused:
        assert refused.status == 400
        json.dumps(refused.body)


@pytest.mark.parametrize(
    ("value", "level"), [("high", -10), ("normal", 0), ("low", 10), (-100, -100), (7, 7), (None, 0)]
)
def test_priorities_are_classes_or_levels_and_lower_goes_first(value, level):
    assert chat(priority=value).generation.priority == level


def test_a_prompt_is_estimated_before_it_is_tokenised():
    assert chat(messages=[{"role": "user", "content": "x" * 400}], n=3).estimated_tokens == 300
    with_tools = chat(messages=[{"role": "user", "content": "x" * 400}], tools=[TOOL]).estimated_tokens
    assert 100 + len(str(TOOL)) // 4 <= with_tools <= 200
    assert completion(prompt=["x" * 400, "x" * 40]).estimated_tokens == 110
    assert completion(prompt=[1, 2, 3], n=2).estimated_tokens == 6


IDS = f"integers in 0..{VOCAB - 1}"
PROMPT = "must be a string, a list of strings, or a list of token ids of the model"
FORMATS = "must be text, json_object or json_schema"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", None, "model: is required"),
        ("model", "", "model: is required"),
        ("model", 1, "model: must be a string of at most 256 characters"),
        ("model", "m" * 257, "model: must be a string of at most 256 characters"),
        ("prompt", None, f"prompt: is required, and {PROMPT}"),
        (
            "prompt",
            [VOCAB],
            "prompt: must be a string, a list of strings, or a list of token ids of the model",
        ),
        ("prompt", [VOCAB] * 65, "prompt: must have at most 64 prompts"),
        ("top_p", 0, "top_p: must be more than 0"),
        ("top_p", 1.1, "top_p: must be a number between 0 and 1"),
        ("timeout", 0.0, "timeout: must be more than 0"),
        ("timeout", -1, "timeout: must be a number between 0 and 86400"),
        ("stop_token_ids", [VOCAB], f"stop_token_ids: must be a list of at most 64 {IDS}"),
        ("stop_token_ids", [1] * 65, f"stop_token_ids: must be a list of at most 64 {IDS}"),
        ("stop_token_ids", [True], f"stop_token_ids: must be a list of at most 64 {IDS}"),
        ("allowed_token_ids", [], "allowed_token_ids: must not be empty: no token could be chosen"),
        ("allowed_token_ids", [-1], f"allowed_token_ids: must be a list of at most 4096 {IDS}"),
        ("logit_bias", {"a": 1}, f"logit_bias: has a name that is no token id in 0..{VOCAB - 1}"),
        ("logit_bias", {str(VOCAB): 1}, f"logit_bias: has a name that is no token id in 0..{VOCAB - 1}"),
        ("cache_control", {}, 'cache_control.type: is required, and must be "ephemeral"'),
        ("response_format", {}, f"response_format.type: is required, and {FORMATS}"),
        ("response_format", {"type": "xml"}, f"response_format.type: {FORMATS}"),
        (
            "response_format",
            {"type": "text", "json_schema": {"name": "a", "schema": {}}},
            "response_format.json_schema: is not a known or supported field",
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": None, "schema": {}}},
            "response_format.json_schema.name: is required, and must be 1 to 64 letters, digits, underscores "
            "or hyphens",
        ),
        ("model", None, "model: is required"),
        ("best_of", 2, "best_of: is not supported, except with the value 1"),
        ("max_tokens", 2**63, f"max_tokens: must be an integer between 0 and {2**63 - 1}"),
        ("top_k", 2**63, f"top_k: must be an integer between -1 and {2**63 - 1}"),
        ("min_tokens", 2**63, f"min_tokens: must be an integer between 0 and {2**63 - 1}"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a"}},
            "response_format.json_schema.schema: is required, and must be a JSON schema: an object",
        ),
        ("structured_outputs", {"json_object": 1}, "structured_outputs.json_object: must be true"),
        ("structured_outputs", {"json_object": 1.0}, "structured_outputs.json_object: must be true"),
    ],
)
def test_an_error_names_the_field_and_what_it_must_be(field, value, message):
    with pytest.raises(ApiError) as caught:
        completion(**{field: value})
    assert caught.value.body["error"]["message"] == message


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("function_call", {"name": "f"}, '"none" or "auto"'),
        ("service_tier", "flex", '"auto" or "default"'),
    ],
)
def test_the_error_of_a_field_that_is_not_implemented_names_every_value_that_is_accepted(
    field, value, accepted
):
    with pytest.raises(ApiError) as caught:
        chat(**{field: value})
    message = f"{field}: is not supported, except with the value {accepted}"
    assert caught.value.body["error"]["message"] == message


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages: is required, and must be a list of 1 to 4096 messages"),
        ([], "messages: must be a list of 1 to 4096 messages"),
        (
            [{"content": "a"}],
            "messages[0].role: is required, and must be one of system, developer, user, assistant, tool",
        ),
        (
            [{"role": "user"}],
            "messages[0].content: is required, and must be a string or a list of text parts",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None}]}],
            'messages[0].content[0]: must be {"type": "text", "text": "..."}',
        ),
    ],
)
def test_an_error_of_a_message_names_its_place(messages, message):
    with pytest.raises(ApiError) as caught:
        chat(messages=messages)
    assert caught.value.body["error"]["message"] == message


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        (TokenizeRequest, {"prompt": 1}, "prompt: must be a string"),
        (TokenizeRequest, {}, "prompt: is required, or messages in its place"),
        (
            TokenizeRequest,
            {"prompt": "a", "messages": CHAT["messages"]},
            "messages: give prompt or messages, not both",
        ),
        (
            TokenizeRequest,
            {"messages": CHAT["messages"], "add_special_tokens": True},
            "add_special_tokens: is supported with prompt only: leave it out",
        ),
        (DetokenizeRequest, {}, "tokens: is required"),
        (DetokenizeRequest, {"tokens": [VOCAB]}, f"tokens: must be a list of at most {4 << 20} {IDS}"),
    ],
)
def test_an_error_of_the_small_requests_names_the_field(model, body, message):
    with pytest.raises(ApiError) as caught:
        request = validate(model, body, VOCAB)
        if isinstance(request, TokenizeRequest):
            request.check()
    assert caught.value.body["error"]["message"] == message


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 0, "nonsense": 1}, "n"), ({"stream_options": {"x": 1, "include_usage": 1}}, "stream_options")],
)
def test_a_wrong_value_is_reported_before_an_unknown_field(fields, param):
    with pytest.raises(ApiError) as caught:
        completion(stream=True, **fields)
    assert caught.value.body["error"]["param"].split(".")[0] == param
    assert "known" not in caught.value.body["error"]["message"]
