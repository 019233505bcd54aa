"""An answer that another server has begun goes on token by token as it would have gone on there."""

import itertools
import json

import httpx
import pytest

from tests.server.conftest import KEY
from tests.server.launch import Server

CHAT = "/v1/chat/completions"
ASK = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me."}],
    "max_tokens": 40,
    "stream": True,
    "stream_options": {"include_usage": True},
}
JSON = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "array", "items": {"type": "integer"}}},
}
CASES = {
    "greedy": {"temperature": 0},
    "greedy to its length": {"temperature": 0, "ignore_eos": True},
    "seeded": {"seed": 7, "temperature": 1.2, "ignore_eos": True},
    "penalties": {"seed": 7, "frequency_penalty": 1.5, "presence_penalty": 0.5, "ignore_eos": True},
    "min tokens": {"seed": 3, "temperature": 2.0, "min_tokens": 30},
    "a grammar": {"seed": 5, "response_format": JSON},
    "a bad word": {"seed": 7, "bad_words": ["a", "e"], "ignore_eos": True},
}


def post(server, body, path=CHAT):
    headers = {"x-quire-token-ids": "true", "authorization": f"Bearer {KEY}"}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60)


class Stream:
    """The events of one answer, and the tokens that came with each."""

    def __init__(self, server, path=CHAT, **fields):
        answer = post(server, {**ASK, **fields}, path)
        assert answer.status_code == 200, answer.text
        *blocks, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        self.events, self.tokens = [], []
        for block in blocks:
            *comments, data = block.split("\n")
            assert len(comments) <= 1
            named = comments[0].removeprefix(": tokens ") if comments else ""
            self.tokens.append([int(one) for one in named.split(",") if one])
            self.events.append(json.loads(data.removeprefix("data: ")))

    def text(self, after=0):
        choices = [choice for event in self.events[after:] for choice in event["choices"]]
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
        )

    def end(self):
        """Why it ended, and what it took; not what was cached, which is each server's own."""
        reasons = [choice["finish_reason"] for event in self.events for choice in event["choices"]]
        usage = dict(self.events[-1]["usage"])
        del usage["prompt_tokens_details"]
        return [reason for reason in reasons if reason], usage

    def resume(self, number):
        """That of which these events are there."""
        return {
            "id": self.events[0]["id"],
            "created": self.events[0]["created"],
            "token_ids": [token for tokens in self.tokens[:number] for token in tokens],
        }


def assert_it_goes_on(server, whole, number, path=CHAT, **fields):
    rest = Stream(server, path, **fields, resume=whole.resume(number))
    assert rest.text() == whole.text(number)
    assert rest.end() == whole.end()
    assert {(event["id"], event["created"]) for event in rest.events} == {
        (whole.events[0]["id"], whole.events[0]["created"])
    }
    assert not any(
        "role" in choice["delta"] for event in rest.events for choice in event["choices"] if path == CHAT
    )


@pytest.mark.parametrize("case", CASES)
def test_an_answer_goes_on_exactly_wherever_it_was_cut(server, case):
    fields = CASES[case]
    whole = Stream(server, **fields)
    assert len(whole.events) > 4 and sum(map(len, whole.tokens)) == whole.end()[1]["completion_tokens"]
    for number in {1, 2, len(whole.events) // 2, len(whole.events) - 3, len(whole.events) - 2}:
        assert_it_goes_on(server, whole, number, **fields)


def test_a_completion_goes_on_and_its_echo_is_not_repeated(server):
    fields = {"prompt": "Once upon a time", "echo": True, "seed": 1, "ignore_eos": True, "messages": None}
    whole = Stream(server, "/v1/completions", **fields)
    assert_it_goes_on(server, whole, 5, "/v1/completions", **fields)


def test_a_stop_string_that_began_before_the_cut_ends_the_answer_after_it(server):
    plain = Stream(server, temperature=0, ignore_eos=True)
    text = plain.text()
    for at in (5, 10, 15):
        stop = text[at : at + 6]
        whole = Stream(server, temperature=0, ignore_eos=True, stop=[stop])
        assert whole.end()[0] == ["stop"]
        for number in range(1, len(whole.events) - 1):
            assert_it_goes_on(server, whole, number, temperature=0, ignore_eos=True, stop=[stop])


def test_the_usage_of_each_chunk_goes_on_as_well(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"temperature": 0, "ignore_eos": True, "stream_options": options}
    whole = Stream(server, **fields)
    given = whole.resume(9)
    rest = Stream(server, **fields, resume=given)
    so_far = itertools.accumulate(map(len, rest.tokens), initial=len(given["token_ids"]))
    assert [event["usage"]["completion_tokens"] for event in rest.events] == list(so_far)[1:]


def test_an_answer_that_was_complete_only_says_so(server):
    for fields in (
        {"temperature": 0, "ignore_eos": True, "max_tokens": 9},
        {"seed": 5, "response_format": JSON},
    ):
        whole = Stream(server, **fields)
        resume = whole.resume(len(whole.events))
        rest = Stream(server, **fields, resume=resume)
        assert (rest.text(), rest.end()) == ("", whole.end())


def test_tokens_are_named_only_where_they_are_asked_for(server):
    answer = server.post(CHAT, ASK, key=KEY)
    assert ": tokens" not in answer.text
    several = post(server, {**ASK, "n": 2})
    assert several.status_code == 200 and ": tokens" not in several.text


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stream": False, "stream_options": None}, "resume: needs stream"),
        ({"n": 2}, "n to be 1"),
        ({"logprobs": True}, "resume: is not supported together with logprobs"),
        ({"resume": {"id": "a", "created": 1, "token_ids": [10**9]}}, "resume.token_ids: must be a list"),
        ({"resume": {"id": "a", "token_ids": []}}, "resume.created"),
        (
            {"resume": {"id": "a", "created": 1, "token_ids": [1] * 41}},
            "resume.token_ids: are more than the 40",
        ),
    ],
)
def test_what_cannot_go_on_is_a_400_that_names_the_field(server, fields, says):
    body = {**ASK, "resume": {"id": "a", "created": 1, "token_ids": [1, 2]}, **fields}
    answer = server.post(CHAT, body, key=KEY)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_tokens_that_the_grammar_does_not_allow_fail_that_request_alone(server):
    fields = {"seed": 5, "response_format": JSON}
    free = Stream(server, seed=7, temperature=1.2, ignore_eos=True).resume(9)
    answer = post(server, {**ASK, **fields, "resume": free})
    says = answer.text if answer.status_code != 200 else answer.text.split("\n\n")[0]
    assert "The tokens so far are not what the grammar allows" in says
    assert_it_goes_on(server, Stream(server, **fields), 3, **fields)


@pytest.mark.deep
@pytest.mark.one_in(2)
@pytest.mark.parametrize("flags", [("--speculative-method", "ngram"), ("--tensor-parallel-size", "2")])
def test_an_answer_goes_on_between_servers_that_compute_it_differently(server, tiny, tmp_path, flags):
    with Server(tiny, tmp_path, *flags).wait_ready() as other:
        for fields in (CASES["greedy to its length"], CASES["seeded"]):
            whole = Stream(server, **fields)
            assert_it_goes_on(other, whole, 9, **fields)
            assert_it_goes_on(server, Stream(other, **fields), 9, **fields)


def deltas(events):
    """What the deltas add up to: content, reasoning, and the name, id and arguments of each call."""
    content, reasoning, calls = "", "", {}
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for entry in delta.get("tool_calls", ()):
            call = calls.setdefault(entry["index"], {"id": "", "name": "", "arguments": ""})
            call["id"] += entry.get("id", "")
            call["name"] += entry["function"].get("name", "")
            call["arguments"] += entry["function"].get("arguments", "")
    return content, reasoning, calls


def assert_all_goes_on(server, **fields):
    whole = Stream(server, **fields)
    for number in range(1, len(whole.events), 3):
        rest = Stream(server, **fields, resume=whole.resume(number))
        assert deltas(whole.events[:number] + rest.events) == deltas(whole.events), number
        assert rest.end() == whole.end()
    return whole


def test_calls_go_on_in_their_middle_with_the_same_ids(server):
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "tell")]
    call = '<tool_call>\n{{"name": "{}", "arguments": {{"city": "Oslo"}}}}\n</tool_call>'
    says = {"choice": ["Wait. " + call.format("look") + call.format("tell")]}
    whole = assert_all_goes_on(server, tools=tools, structured_outputs=says, max_tokens=300, seed=5)
    assert whole.end()[0] == ["tool_calls"] and len(deltas(whole.events)[2]) == 2


def test_a_thought_goes_on_in_its_middle_and_the_answer_after_it(thinking):
    whole = assert_all_goes_on(thinking, seed=5, thinking_token_budget=12, ignore_eos=True, max_tokens=24)
    content, reasoning, _ = deltas(whole.events)
    assert content and reasoning
