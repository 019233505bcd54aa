"""Tools over HTTP, from a model with random weights. What it says is given: a choice of one text, which the
parser reads as if the model had written it of its own.
"""

import json
from collections import Counter

import pytest

from tests.server.conftest import KEY

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK = {
    "name": "get_time",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, CLOCK)]
ARGUMENTS = '{"city": "Oslo", "days": 2}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "How is the weather in Oslo?"}],
    "tools": TOOLS,
    "max_tokens": 600,
    "temperature": 1,
    "seed": 5,
}


def ask(server, key=KEY, **fields):
    answer = server.post("/v1/chat/completions", {**CHAT, **fields}, key=key)
    assert answer.status_code == 200, answer.text
    return answer


def says(text):
    """The field that has the model say a text."""
    return {"structured_outputs": {"choice": [text]}}


def events(answer):
    lines = answer.text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line.startswith("data: ")]


def joined(answer, index=0):
    """A stream's message, put together as clients do, and the order of its kinds of deltas."""
    message, kinds, reason = {"content": "", "reasoning_content": "", "tool_calls": []}, [], None
    for chunk in events(answer):
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            reason = choice["finish_reason"] or reason
            for kind, value in choice["delta"].items():
                if kind == "tool_calls":
                    for entry in value:
                        if "id" in entry:
                            assert entry["index"] == len(message["tool_calls"])
                            message["tool_calls"].append(
                                {name: entry[name] for name in ("id", "type")}
                                | {"function": dict(entry["function"])}
                            )
                            kinds.append("name")
                        else:
                            assert set(entry) == {"index", "function"}
                            function = message["tool_calls"][entry["index"]]["function"]
                            function["arguments"] += entry["function"]["arguments"]
                            kinds.append("arguments")
                elif kind != "role" and value:
                    message[kind] += value
                    kinds.append(kind)
    return message, kinds, reason


def arguments_of(message):
    return [json.loads(one["function"]["arguments"]) for one in message["tool_calls"]]


def test_the_name_comes_first_then_arguments_in_pieces_and_the_end_says_tool_calls(server):
    fields = says(f"Let me look.\n{CALL}")
    (choice,) = ask(server, **fields).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
    message, kinds, reason = joined(ask(server, stream=True, **fields))
    assert reason == "tool_calls"
    assert message["content"] == "Let me look." and [one["function"] for one in message["tool_calls"]] == [
        call["function"]
    ]
    first = kinds.index("name")
    assert set(kinds[:first]) == {"content"} and set(kinds[first + 1 :]) == {"arguments"}
    assert kinds.count("arguments") >= 10, "they did not come piece by piece"


def test_several_calls_have_an_index_and_an_id_each(server):
    message, kinds, reason = joined(ask(server, stream=True, **says(f"{CALL}\n{CALL}")))
    assert [one["function"]["arguments"] for one in message["tool_calls"]] == [ARGUMENTS] * 2
    assert len({one["id"] for one in message["tool_calls"]}) == kinds.count("name") == 2
    assert (message["content"], reason) == ("", "tool_calls")


@pytest.mark.parametrize(
    "text",
    [
        "It is sunny.",
        'A <tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> of nothing',
        '<tool_call>\n{"name": "weather", "argum',
        "<tool_cal",
    ],
)
def test_what_is_no_call_is_text_without_a_lost_character(server, text):
    (choice,) = ask(server, **says(text)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]
    message, _, reason = joined(ask(server, stream=True, **says(text)))
    assert (message["content"], message["tool_calls"], reason) == (text, [], "stop")


def test_without_tools_a_call_is_text(server):
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        (choice,) = ask(server, **fields, **says(CALL)).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


@pytest.mark.parametrize("seed", range(3))
def test_required_calls_satisfy_the_schema_and_streams_equal_whole_answers(server, seed):
    fields = {"tool_choice": "required", "seed": seed}
    (choice,) = ask(server, **fields).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    for call, given in zip(choice["message"]["tool_calls"], arguments_of(choice["message"]), strict=True):
        if call["function"]["name"] == "weather":
            assert set(given) == {"city", "days"} and given["days"] in (1, 2, 3)
        else:
            assert (call["function"]["name"], given) == ("get_time", {})
    message, _, reason = joined(ask(server, stream=True, **fields))
    assert reason == "tool_calls"
    assert [one["function"] for one in message["tool_calls"]] == [
        one["function"] for one in choice["message"]["tool_calls"]
    ]


def test_a_named_function_is_called_once_in_each_of_n_answers(server):
    named = {"type": "function", "function": {"name": "weather"}}
    answer = ask(server, tool_choice=named, n=3).json()
    calls = [choice["message"]["tool_calls"] for choice in answer["choices"]]
    assert [len(one) for one in calls] == [1, 1, 1]
    assert all(one["function"]["name"] == "weather" for (one,) in calls)
    assert len({one["id"] for (one,) in calls}) == 3, "ids must differ in one conversation"
    streamed = ask(server, tool_choice=named, n=3, stream=True)
    for index, choice in enumerate(answer["choices"]):
        assert arguments_of(joined(streamed, index)[0]) == arguments_of(choice["message"])


def test_without_parallel_calls_there_is_one(server):
    answer = ask(server, tool_choice="required", parallel_tool_calls=False, n=4).json()
    assert Counter(len(one["message"]["tool_calls"]) for one in answer["choices"]) == {1: 4}


def test_the_arguments_of_strict_tools_satisfy_the_schema_where_the_model_may_speak(server):
    """The model is led to its call by a bias; the rest is the grammar's."""
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    refused = server.post("/v1/chat/completions", {**CHAT, "tools": strict, **says(CALL)}, key=KEY)
    assert refused.status_code == 400 and "strict" in refused.json()["error"]["message"]
    (choice,) = ask(server, tools=strict, max_tokens=40).json()["choices"]
    assert choice["finish_reason"] in ("stop", "length") or arguments_of(choice["message"])


def test_an_answer_that_is_cut_in_a_call_ends_by_its_length(server):
    named = {"type": "function", "function": {"name": "weather"}}
    fields = {"tool_choice": named, "max_tokens": 45}
    (choice,) = ask(server, **fields).json()["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and call["function"]["arguments"].startswith("{")
    assert joined(ask(server, stream=True, **fields))[2] == "length"


def test_usage_and_logprobs_count_every_token_of_a_call(server):
    fields = {**says(f"So: {CALL}"), "logprobs": True, "top_logprobs": 1}
    whole = ask(server, **fields).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in entries) == f"So: {CALL}"
    assert whole["usage"]["completion_tokens"] == len(entries) + 1  # the end
    streamed = events(ask(server, **fields, stream=True, stream_options={"include_usage": True}))
    assert streamed[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    logprobs = [choice["logprobs"] for chunk in streamed for choice in chunk["choices"]]
    assert [one["token"] for part in logprobs if part for one in part["content"]] == [
        one["token"] for one in entries
    ]


def test_a_stop_string_ends_the_answer_and_what_was_called_stays(server):
    (choice,) = ask(server, **says(CALL), stop=["days"]).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Oslo", "'
    message, _, reason = joined(ask(server, stream=True, **says(CALL), stop=["days"]))
    assert message["tool_calls"][0]["function"] == call["function"]
    assert reason == choice["finish_reason"]


def test_a_client_that_leaves_in_a_call_frees_its_row(server):
    with server.client(KEY) as client:
        stream = client.chat.completions.create(
            **{**CHAT, "max_tokens": 1200},
            tool_choice="required",
            stream=True,
            extra_body={"min_tokens": 1000},
        )
        next(iter(stream))
        stream.close()
    server.wait("free rows", lambda: server.metric("llm_running_requests") == 0)


def test_a_conversation_with_calls_and_results_is_one_more_prompt_of_the_prefix_cache(server):
    first = ask(server, **says(CALL)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "Rain."}
    messages = [*CHAT["messages"], first, result]
    for _ in range(2):
        again = ask(server, messages=messages, **says("It rains.")).json()
    assert again["choices"][0]["message"]["content"] == "It rains."
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"messages": [{"role": "tool", "content": None}]}, "messages[0].content"),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_the_field(server, fields, param):
    answer = server.post("/v1/chat/completions", {**CHAT, **fields}, key=KEY)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_what_changes_nothing_is_taken_and_named_in_a_header(server):
    fields = {
        "metadata": {"a": "b"},
        "store": False,
        "user": "me",
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True},
        "thinking_token_budget": 5,
    }
    answer = ask(server, **fields, **says("Yes."))
    ignored = answer.headers["x-quire-ignored"].split(", ")
    assert ignored == ["metadata", "reasoning_effort", "enable_thinking", "thinking_token_budget"]
    assert "x-quire-ignored" not in ask(server, **says("Yes.")).headers


THINK = {"tools": [], "ignore_eos": True, "max_tokens": 40, "logprobs": True}


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thought_ends_at_its_budget_and_the_answer_begins(thinking, budget):
    answer = ask(thinking, **THINK, thinking_token_budget=budget).json()
    (choice,) = answer["choices"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": budget + len(["</think>"])}
    tokens = [one["token"] for one in choice["logprobs"]["content"]]
    assert tokens.index("</think>") == budget and len(tokens) == 40
    said = b"".join(bytes(one["bytes"]) for one in choice["logprobs"]["content"])
    thought, _, text = said.decode(errors="replace").partition("</think>")
    assert choice["message"].get("reasoning_content", "") == thought.strip()
    assert choice["message"]["content"] == text.lstrip() != ""
    message, kinds, reason = joined(ask(thinking, **THINK, thinking_token_budget=budget, stream=True))
    assert message["content"] == choice["message"]["content"]
    assert message["reasoning_content"] == choice["message"].get("reasoning_content", "")
    assert kinds == sorted(kinds, reverse=True), "a thought came after text"
    assert reason == "length"


def test_a_thought_that_is_cut_is_no_text(thinking):
    answer = ask(thinking, **THINK, logit_bias=never_ends(thinking)).json()
    (choice,), usage = answer["choices"], answer["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": usage["completion_tokens"]}
    assert choice["message"]["content"] == "" and choice["message"]["reasoning_content"]
    assert choice["finish_reason"] == "length"


def test_a_client_can_have_the_model_not_think(thinking):
    for fields in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ):
        answer = ask(thinking, **THINK, **fields, thinking_token_budget=3)
        (choice,) = answer.json()["choices"]
        assert "reasoning_content" not in choice["message"] and choice["message"]["content"]
        assert answer.headers["x-quire-ignored"] == "thinking_token_budget"
    refused = thinking.post(
        "/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"bos_token": "x"}}, key=KEY
    )
    assert refused.json()["error"]["param"] == "chat_template_kwargs.bos_token"


def test_an_enforced_call_does_without_a_thought(thinking):
    (choice,) = ask(thinking, tool_choice="required").json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"]
    assert "reasoning_content" not in choice["message"] and choice["message"]["content"] is None


def test_drafts_change_neither_thoughts_with_a_budget_nor_calls(thinking):
    """A bias makes the text repeat itself, so that there are drafts to accept."""
    biased = {**THINK, "logit_bias": {"65": 30}, "temperature": 0, "thinking_token_budget": 9}
    accepted = thinking.metric("llm_spec_decode_accepted_tokens_total")
    (choice,) = ask(thinking, **biased).json()["choices"]
    assert thinking.metric("llm_spec_decode_accepted_tokens_total") > accepted
    tokens = [one["token"] for one in choice["logprobs"]["content"]]
    assert tokens.index("</think>") == 9 and tokens[:9] == [tokens[0]] * 9
    drafted = thinking.metric("llm_spec_decode_draft_tokens_total")
    (choice,) = ask(thinking, tool_choice="required", temperature=0).json()["choices"]
    assert thinking.metric("llm_spec_decode_draft_tokens_total") > drafted
    assert all(set(given) <= {"city", "days"} for given in arguments_of(choice["message"]))


def never_ends(server):
    """The bias that keeps the thought from its end."""
    (token,) = server.post("/tokenize", {"prompt": "</think>"}).json()["tokens"]
    return {str(token): -100}
