"""Anthropic's messages over HTTP, from models with random weights. What they say is given: a choice of one
text, which the parsers read as if the model had written it of its own.
"""

import json

import httpx
import pytest

from quire_server.api.protocol import message_responses as models
from tests.server.conftest import KEY
from tests.server.launch import NO_TLS
from tests.server.serving.test_tools import CALL, WEATHER, never_ends

TOOL = {"name": "weather", "description": "The weather.", "input_schema": WEATHER["parameters"]}
ASK = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "How is the weather in Oslo?"}],
    "max_tokens": 600,
    "seed": 5,
}
INPUT = {"city": "Oslo", "days": 2}
EVENTS = {one.model_fields["type"].annotation.__args__[0]: one for one in models.MESSAGE_EVENTS}


def post(server, path="/v1/messages", key=KEY, **fields):
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    body = {**ASK, **fields}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60, verify=NO_TLS)


def ask(server, **fields):
    answer = post(server, **fields)
    assert answer.status_code == 200, answer.text
    models.Message.model_validate_json(answer.content)
    return answer.json()


def says(text):
    """The field that has the model say a text."""
    return {"structured_outputs": {"choice": [text]}}


def stream(server, **fields):
    """The events of a stream, each checked against the document's model of its type."""
    answer = post(server, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    found = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        data = data.removeprefix("data: ")
        kind = json.loads(data)["type"]
        assert name == f"event: {kind}"
        EVENTS[kind].model_validate_json(data)
        found.append(json.loads(data))
    return found


def joined(events):
    """The message that clients put together of a stream, and the types of its events."""
    message, texts = None, []
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"]) == len(texts)
                message["content"].append(event["content_block"])
                texts.append("")
            case "content_block_delta":
                assert event["index"] == len(texts) - 1, "only the last block is open"
                texts[-1] += next(value for name, value in event["delta"].items() if name != "type")
            case "content_block_stop":
                block = message["content"][event["index"]]
                name = {"tool_use": "input"}.get(block["type"], block["type"])
                block[name] = json.loads(texts[-1] or "{}") if name == "input" else texts[-1]
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    return message, [event["type"] for event in events]


def same(message):
    """What two answers to the same request share."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    tokens = message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    return blocks, message["stop_reason"], message["stop_sequence"], tokens, message["usage"]["output_tokens"]


def test_a_text_and_a_call_are_blocks_whole_and_in_events_in_their_order(server):
    fields = {"tools": [TOOL], **says(f"Let me look.\n{CALL}")}
    message = ask(server, **fields)
    text, call = message["content"]
    assert text == {"type": "text", "text": "Let me look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", INPUT)
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    streamed, kinds = joined(stream(server, **fields))
    assert same(streamed) == same(message)
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    within = [kind for kind, before in zip(kinds[1:-2], kinds, strict=False) if kind != before]
    assert within == ["content_block_start", "content_block_delta", "content_block_stop"] * 2
    assert kinds.count("content_block_delta") > 10, "it did not come piece by piece"


def test_several_calls_are_blocks_with_an_id_each(server):
    streamed, _ = joined(stream(server, tools=[TOOL], **says(f"{CALL}\n{CALL}")))
    assert [block["input"] for block in streamed["content"]] == [INPUT] * 2
    assert len({block["id"] for block in streamed["content"]}) == 2


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        (says("Yes. No."), "end_turn", None),
        ({**says("Yes. No."), "stop_sequences": ["x", " N"]}, "stop_sequence", " N"),
        ({"max_tokens": 3, "ignore_eos": True}, "max_tokens", None),
    ],
)
def test_the_end_of_an_answer_has_its_reason(server, fields, reason, sequence):
    message = ask(server, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert same(joined(stream(server, **fields))[0]) == same(message)
    if reason == "stop_sequence":
        assert message["content"] == [{"type": "text", "text": "Yes."}]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_that_has_to_be_used_is_used_with_arguments_of_its_schema(server, choice):
    alone = {**choice, "disable_parallel_tool_use": True}
    (call,) = ask(server, tools=[TOOL], tool_choice=alone)["content"]
    assert set(call["input"]) == {"city", "days"} and call["input"]["days"] in (1, 2, 3)
    (block,) = ask(server, tools=[TOOL], tool_choice={"type": "none"}, **says(CALL))["content"]
    assert block == {"type": "text", "text": CALL}


def test_a_call_that_is_cut_has_no_arguments_and_says_so(server):
    message = ask(server, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}, max_tokens=45)
    assert (message["content"][0]["input"], message["stop_reason"]) == ({}, "max_tokens")


def test_an_answer_and_the_result_of_its_call_go_on_as_a_conversation(server):
    first = ask(server, tools=[TOOL], **says(f"So:\n{CALL}"))
    result = {
        "type": "tool_result",
        "tool_use_id": first["content"][1]["id"],
        "content": [{"type": "text", "text": "Rain."}],
    }
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    fields = {"messages": messages, "tools": [TOOL], "system": [{"type": "text", "text": "Be brief."}]}
    again = [ask(server, **fields, **says("It rains.")) for _ in range(2)][1]
    assert again["content"] == [{"type": "text", "text": "It rains."}]
    assert again["usage"]["cache_read_input_tokens"] > 0
    counted = post(server, "/v1/messages/count_tokens", **fields, max_tokens=None, seed=None).json()
    prompt = again["usage"]["input_tokens"] + again["usage"]["cache_read_input_tokens"]
    assert counted == {"input_tokens": prompt}


def test_an_answer_has_the_form_that_is_asked_for_and_ignored_fields_are_named(server):
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"const": 1}}}}
    fields = {
        "output_config": {
            "format": {**form, "schema": {**form["schema"], "required": ["a"]}},
            "effort": "low",
        },
        "thinking": {"type": "enabled", "budget_tokens": 4},
        "metadata": {"user_id": "me"},
    }
    answer = post(server, **fields)
    assert json.loads(answer.json()["content"][0]["text"])["a"] == 1
    assert answer.headers["x-quire-ignored"] == "output_config.effort, thinking"


THINK = {"ignore_eos": True, "max_tokens": 40}


def test_a_thought_is_a_block_of_its_own_with_a_budget_and_can_be_switched_off(thinking):
    budget = {"type": "enabled", "budget_tokens": 7}
    message = ask(thinking, **THINK, thinking=budget)
    thought, text = message["content"]
    assert (thought["type"], thought["signature"], text["type"]) == ("thinking", "", "text")
    assert same(joined(stream(thinking, **THINK, thinking=budget))[0]) == same(message)
    cut = ask(thinking, **THINK, logit_bias=never_ends(thinking))
    assert [block["type"] for block in cut["content"]] == ["thinking"]
    plain = ask(thinking, **THINK, thinking={"type": "disabled"}, logit_bias=never_ends(thinking))
    assert [block["type"] for block in plain["content"]] == ["text"]
    messages = [*ASK["messages"], {"role": "assistant", "content": message["content"]}, *ASK["messages"]]
    assert ask(thinking, **THINK, messages=messages)["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "status", "kind", "param"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"surprise": 1}, 400, "invalid_request_error", "surprise"),
        ({"model": "claude"}, 404, "not_found_error", "model"),
        ({"key": "wrong"}, 401, "authentication_error", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0]",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, None, "tools[0].type"),
        ({"messages": [{"role": "assistant", "content": "So"}]}, 400, None, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a" * 9000}]}, 400, None, "messages"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, 400, None, "tool_choice"),
    ],
)
def test_an_error_has_anthropic_s_form_and_names_the_field(server, fields, status, kind, param):
    answer = post(server, **fields)
    body = answer.json()
    models.MessagesError.model_validate_json(answer.content)
    assert (answer.status_code, body["type"]) == (status, "error"), answer.text
    assert body["error"]["type"] == (kind or "invalid_request_error")
    assert body["error"]["param"] == param
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_a_gateway_is_given_the_usage_in_a_comment(server):
    headers = {"authorization": f"Bearer {KEY}", "x-quire-usage": "true"}
    body = {**ASK, **says("Yes."), "stream": True}
    answer = httpx.post(server.url + "/v1/messages", json=body, headers=headers, timeout=60, verify=NO_TLS)
    (comment,) = [line for line in answer.text.split("\n") if line.startswith(":")]
    assert json.loads(comment.removeprefix(": usage "))["completion_tokens"] == 5
