"""OpenAI's Responses over HTTP, from models with random weights. What they say is given: a choice of one
text, which the parsers read as if the model had written it of its own.
"""

import json

import httpx
import pytest

from quire_server.api.protocol import openai_response_bodies as models
from tests.server.conftest import ADMIN_KEY, KEY
from tests.server.launch import NO_TLS
from tests.server.serving.test_tools import ARGUMENTS, CALL, WEATHER, never_ends

TOOL = {"type": "function", **WEATHER}
ASK = {"model": "tiny", "input": "How is the weather in Oslo?", "max_output_tokens": 600, "seed": 5}
EVENTS = {
    kind: one for one in models.RESPONSE_EVENTS for kind in one.model_fields["type"].annotation.__args__
}
PATH = "/v1/responses"


def send(server, path=PATH, method="POST", key=KEY, headers=(), **body):
    headers = {"authorization": f"Bearer {key}", **dict(headers)}
    content = json.dumps({**ASK, **body}) if method == "POST" else None
    return httpx.request(
        method, server.url + path, content=content, headers=headers, timeout=60, verify=NO_TLS
    )


def ask(server, **fields):
    answer = send(server, **fields)
    assert answer.status_code == 200, answer.text
    models.ResponseBody.model_validate_json(answer.content)
    return answer.json()


def says(text):
    """The field that has the model say a text."""
    return {"structured_outputs": {"choice": [text]}}


def stream(server, **fields):
    """The events of a stream, each checked against the document's model of its type."""
    answer = send(server, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    found = []
    for number, event in enumerate(answer.text.removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        data = data.removeprefix("data: ")
        found.append(json.loads(data))
        assert name == f"event: {found[-1]['type']}" and found[-1]["sequence_number"] == number
        EVENTS[found[-1]["type"]].model_validate_json(data)
    return found


def joined(events):
    """The items that clients put together of a stream, which are those of its last event."""
    items, texts = [], []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
                texts.append("")
            case kind if kind.endswith(".delta"):
                assert event["item_id"] == items[-1]["id"] and event["output_index"] == len(items) - 1
                texts[-1] += event["delta"]
            case "response.output_item.done":
                done = event["item"]
                whole = done["arguments"] if "arguments" in done else done["content"][0]["text"]
                assert (whole, done["id"]) == (texts[-1], items[-1]["id"])
                items[-1] = done
    assert items == events[-1]["response"]["output"]
    return events[-1]["response"], [event["type"].removeprefix("response.") for event in events]


def same(response):
    """What two answers to the same request share."""
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    return items, response["status"], response["usage"]["output_tokens"], response["tools"]


def test_a_text_and_a_call_are_items_whole_and_in_numbered_events_in_their_order(server):
    fields = {"tools": [TOOL], **says(f"Let me look.\n{CALL}")}
    response = ask(server, **fields)
    message, call = response["output"]
    assert message["content"][0]["text"] == "Let me look."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", ARGUMENTS)
    assert response["status"] == "completed" and response["incomplete_details"] is None
    streamed, kinds = joined(stream(server, **fields))
    assert same(streamed) == same(response)
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    order = [kind for kind, before in zip(kinds[2:-1], kinds[1:], strict=False) if kind != before]
    assert order == [
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
    ]


def test_an_answer_that_is_cut_is_incomplete(server):
    fields = {"max_output_tokens": 3, "ignore_eos": True}
    response = ask(server, **fields)
    assert response["status"] == response["output"][-1]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    streamed, kinds = joined(stream(server, **fields))
    assert same(streamed) == same(response) and kinds[-1] == "incomplete"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_function_that_has_to_be_called_is_called_with_arguments_of_its_schema(server, choice):
    (call,) = ask(server, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)["output"]
    assert set(json.loads(call["arguments"])) == {"city", "days"}
    (message,) = ask(server, tools=[TOOL], tool_choice="none", **says(CALL))["output"]
    assert message["content"][0]["text"] == CALL


def test_an_answer_has_the_form_that_is_asked_for_and_repeats_its_request(server):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    fields = {
        "text": {"format": form, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"who": "me"},
        "instructions": "Be brief.",
        "temperature": 0.5,
    }
    answer = send(server, **fields)
    body = answer.json()
    assert json.loads(body["output"][0]["content"][0]["text"])["a"] == 1
    assert body["text"]["format"] == form and body["metadata"] == fields["metadata"]
    assert (body["temperature"], body["instructions"]) == (0.5, "Be brief.")
    ignored = {"reasoning.summary", "text.verbosity", "include", "reasoning.effort"}
    assert set(answer.headers["x-quire-ignored"].split(", ")) == ignored
    any_object = ask(server, text={"format": {"type": "json_object"}}, max_output_tokens=300)
    assert any_object["output"][0]["content"][0]["text"].lstrip().startswith("{")


def test_a_conversation_goes_on_by_the_id_of_a_response_as_by_its_items(server):
    first = ask(server, tools=[TOOL], **says(f"So:\n{CALL}"))
    output = {
        "type": "function_call_output",
        "call_id": first["output"][1]["call_id"],
        "output": [{"type": "input_text", "text": "Rain."}],
    }
    items = [{"role": "user", "content": ASK["input"]}, *first["output"], output]
    fields = {"tools": [TOOL], **says("It rains.")}
    by_id = ask(server, previous_response_id=first["id"], input=[output], **fields)
    by_items = ask(server, input=items, **fields)
    assert by_id["usage"]["input_tokens"] == by_items["usage"]["input_tokens"]
    assert by_items["usage"]["input_tokens_details"]["cached_tokens"] > 0
    third = ask(server, previous_response_id=by_id["id"], input="And?", tools=[TOOL], **says("So."))
    assert third["usage"]["input_tokens"] > by_id["usage"]["input_tokens"]
    assert third["previous_response_id"] == by_id["id"]


def test_a_kept_response_is_its_client_s_alone_until_it_is_deleted(server):
    one = ask(server, **says("Yes."))
    streamed, _ = joined(stream(server, **says("Yes.")))
    for response in (one, streamed):
        assert send(server, f"{PATH}/{response['id']}", "GET").json() == response
    path = f"{PATH}/{one['id']}"
    other = send(server, path, "GET", key=ADMIN_KEY)
    assert (other.status_code, other.json()["error"]["code"]) == (404, "response_not_found")
    assert send(server, path, "DELETE", key=ADMIN_KEY).status_code == 404
    assert send(server, path, "DELETE").json() == {"id": one["id"], "object": "response", "deleted": True}
    assert send(server, path, "GET").status_code == 404
    refused = send(server, previous_response_id=one["id"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
    unkept = ask(server, store=False, **says("Yes."))
    assert send(server, f"{PATH}/{unkept['id']}", "GET").status_code == 404


CALLED = [
    {"role": "developer", "content": "Be short."},
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "Look"}, {"type": "input_text", "text": "!"}],
    },
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "content": "Wait."},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Å"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
]


def test_the_input_of_a_kept_response_is_listed_page_by_page_in_both_orders(server):
    first = ask(server, input=CALLED, instructions="Not one of them.", **says("Yes."))
    second = ask(server, previous_response_id=first["id"], input="And now?", **says("No."))
    with server.client(KEY) as client:
        listed = list(client.responses.input_items.list(second["id"], order="asc", limit=3))
        latest = list(client.responses.input_items.list(second["id"], limit=7))
    assert [item.type for item in listed] == [
        *("message", "message", "reasoning", "message", "function_call", "function_call_output"),
        *("message", "message"),
    ]
    texts = [item.content[0].text for item in listed if item.type == "message"]
    assert texts == ["Be short.", "Look\n!", "Wait.", "Yes.", "And now?"]
    assert [item.role for item in listed if item.type == "message"] == [
        *("system", "user", "assistant", "assistant", "user")
    ]
    thought, call, output = listed[2], listed[4], listed[5]
    assert thought.content[0].text == "Hm." and output.output == "Rain."
    assert (call.call_id, call.name, call.arguments) == ("c1", "weather", '{"city": "Å"}')
    assert len({item.id for item in listed}) == 8
    assert [item.id for item in latest] == [item.id for item in reversed(listed)]
    page = send(server, f"{PATH}/{second['id']}/input_items?limit=3&order=asc", "GET").json()
    models.InputItemList.model_validate(page)
    assert (page["first_id"], page["last_id"], page["has_more"]) == (listed[0].id, listed[2].id, True)
    # What is sent back as input is the same conversation.
    again = ask(server, input=[item.model_dump(exclude_none=True) for item in listed], **says("No."))
    assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=%D9%A1", "limit"),
        ("limit=", "limit"),
        ("order=up", "order"),
        ("order=asc&order=asc", "order"),
        ("after=x", "after"),
        ("include=a", "include"),
    ],
)
def test_a_page_that_cannot_be_given_is_a_400_that_names_the_parameter(server, query, param):
    kept = ask(server, **says("Yes."))["id"]
    refused = send(server, f"{PATH}/{kept}/input_items?{query}", "GET")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_what_is_kept_has_ended_and_is_another_client_s_to_neither_list_nor_cancel(server):
    kept = ask(server, **says("Yes."))["id"]
    refused = send(server, f"{PATH}/{kept}/cancel")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_id")
    assert "without background" in refused.json()["error"]["message"]
    for method, what in (("GET", "input_items"), ("POST", "cancel")):
        other = send(server, f"{PATH}/{kept}/{what}", method, key=ADMIN_KEY)
        assert (other.status_code, other.json()["error"]["code"]) == (404, "response_not_found")


THINK = {"ignore_eos": True, "max_output_tokens": 40}


def test_a_thought_is_an_item_of_its_own_with_a_budget_and_can_be_switched_off(thinking):
    fields = {**THINK, "thinking_token_budget": 7}
    response = ask(thinking, **fields)
    thought, message = response["output"]
    assert (thought["type"], thought["summary"], message["type"]) == ("reasoning", [], "message")
    assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] < 40
    streamed, kinds = joined(stream(thinking, **fields))
    assert same(streamed) == same(response) and "reasoning_text.delta" in kinds
    plain = ask(thinking, **THINK, reasoning={"effort": "none"}, logit_bias=never_ends(thinking))
    assert [item["type"] for item in plain["output"]] == ["message"]
    again = ask(thinking, **THINK, input=[{"role": "user", "content": "a"}, *response["output"]])
    assert again["usage"]["input_tokens"] > plain["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": None}, 400, "input"),
        ({"surprise": 1}, 400, "surprise"),
        ({"model": "gpt-9"}, 404, "model"),
        ({"background": True}, 400, "background"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            400,
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0]"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"input": "a" * 9000}, 400, "input"),
        ({"max_output_tokens": 1 << 40}, 400, "max_output_tokens"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"metadata": {"x" * 65: "a"}}, 400, "metadata"),
    ],
)
def test_an_error_names_the_field_as_the_request_has_it(server, fields, status, param):
    answer = send(server, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), answer.text
    assert error["message"].startswith(f"{param}: ") or status == 404 or len(str(fields)) > 5000
    if param == "background":
        assert "/v1/jobs" in error["message"]


def test_a_gateway_is_given_the_usage_and_an_id_that_leads_back(server):
    headers = {"x-quire-usage": "true", "x-quire-replica": "abc123"}
    answer = send(server, headers=headers, **says("Yes."), stream=True)
    (comment,) = [line for line in answer.text.split("\n") if line.startswith(":")]
    assert json.loads(comment.removeprefix(": usage "))["completion_tokens"] == 5
    assert '"id":"resp_abc123_' in answer.text
    assert ask(server, headers={"x-quire-replica": "../x"}, **says("Yes."))["id"].count("_") == 1
