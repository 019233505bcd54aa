"""Structured output over HTTP and by openai-python, from a model with random weights."""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Literal

import httpx
import pytest
from pydantic import BaseModel, Field

from tests.server.conftest import KEY
from tests.server.text.test_grammar_compiler import HOSTILE
from tests.server.text.toy import accepts

MESSAGES = [{"role": "user", "content": "Tell me something."}]
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 500}


class Part(BaseModel):
    size: Literal["small", "large"]
    price: float | None


class Order(BaseModel):
    number: int = Field(ge=1, le=99)
    note: str = Field(max_length=20)
    parts: list[Part] = Field(min_length=1, max_length=3)


@pytest.fixture(scope="module")
def client(server):
    with server.client(KEY) as client:
        yield client


def ask(server, path="/v1/chat/completions", **fields):
    base = (
        CHAT if path.endswith("chat/completions") else {"model": "tiny", "prompt": "Once", "max_tokens": 500}
    )
    return server.post(path, {**base, **fields}, key=KEY)


def canary(server):
    answer = ask(server, max_tokens=8, temperature=0, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("seed", range(4))
def test_openai_s_parse_helper_returns_the_requested_object(client, seed):
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Order, seed=seed, max_tokens=1500
    )
    order = answer.choices[0].message.parsed
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(order, Order)
    assert 1 <= order.number <= 99 and 1 <= len(order.parts) <= 3


def test_openai_s_streaming_helper_returns_the_requested_object(client):
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Order, seed=1, max_tokens=1500
    ) as stream:
        order = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(order, Order)


def test_all_n_answers_follow_the_grammar_and_streams_equal_non_streamed_answers(server):
    fields = {"structured_outputs": {"regex": r"[A-Z]\d{2,30}é?"}, "seed": 3, "n": 4}
    whole = [choice["message"]["content"] for choice in ask(server, **fields).json()["choices"]]
    assert len(set(whole)) == 4
    assert all(re.fullmatch(r"[A-Z]\d{2,30}é?", text) for text in whole)
    streamed = dict.fromkeys(range(4), "")
    lines = ask(server, **fields, stream=True).text.split("\n\n")
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert list(streamed.values()) == whole


@pytest.mark.parametrize(
    ("form", "is_right"),
    [
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"grammar": 'root ::= "(" root ")" | [a-f]{2}'}, lambda text: text.count("(") == text.count(")")),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
        ({"json": {"type": "integer", "minimum": 7, "maximum": 9}}, lambda text: 7 <= int(text) <= 9),
    ],
)
def test_completions_accept_every_form_of_structured_output(server, form, is_right):
    for seed in range(3):
        answer = ask(server, "/v1/completions", structured_outputs=form, seed=seed, max_tokens=1500).json()
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "stop", choice
        assert is_right(choice["text"]), choice


def test_max_tokens_cuts_an_answer_with_finish_reason_length(server):
    answer = ask(server, structured_outputs={"regex": "[ab]{40}"}, max_tokens=10).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    assert re.fullmatch("[ab]{10}", answer["message"]["content"])


def test_min_tokens_and_stop_ids_do_not_break_a_grammar(server):
    fields = {"structured_outputs": {"choice": ["yes", "no"]}, "min_tokens": 9, "stop_token_ids": [5, 6]}
    answer = ask(server, **fields).json()["choices"][0]
    assert answer["message"]["content"] in ("yes", "no")
    assert answer["finish_reason"] == "stop"


def test_every_hostile_grammar_is_a_400_and_does_not_change_later_answers(server):
    expected = canary(server)
    for name, (kind, text) in HOSTILE.items():
        form = {kind: text if isinstance(text, str) else json.dumps(text)}
        answer = ask(server, structured_outputs=form)
        assert answer.status_code == 400, (name, answer.text)
        assert answer.json()["error"]["param"] == f"structured_outputs.{kind}", name
        assert canary(server) == expected, name
    assert server.probe("readyz") == 200


async def test_other_requests_are_answered_while_a_hostile_schema_compiles(server):
    hostile = HOSTILE["an automaton of 60 million states"][1]
    headers = {"authorization": f"Bearer {KEY}"}
    plain = {**CHAT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as http:
        await http.post("/v1/chat/completions", json={**CHAT, "structured_outputs": {"regex": "known"}})
        compiling = asyncio.create_task(
            http.post(
                "/v1/chat/completions",
                json={**CHAT, "structured_outputs": {"json": {**hostile, "title": "x"}}},
            )
        )
        answers, slowest = 0, 0.0
        while not compiling.done():
            begun = time.monotonic()
            known = {**CHAT, "structured_outputs": {"regex": "known"}}
            both = await asyncio.gather(
                http.post("/v1/chat/completions", json=plain), http.post("/v1/chat/completions", json=known)
            )
            assert [one.status_code for one in both] == [200, 200]
            slowest = max(slowest, time.monotonic() - begun)
            answers += 1
        assert compiling.result().status_code == 400
    assert answers >= 3, "the others waited for the hostile schema"
    assert slowest < 2.0  # what the compiler is given


def test_logprobs_with_a_grammar_are_those_before_masking(server):
    fields = {"structured_outputs": {"regex": "[ab]{3}"}, "logprobs": True, "top_logprobs": 3}
    logprobs = ask(server, **fields).json()["choices"][0]["logprobs"]["content"]
    assert len(logprobs) == 3
    assert all(-50 < entry["logprob"] < 0 for entry in logprobs)
    assert any(top["token"] not in ("a", "b") for entry in logprobs for top in entry["top_logprobs"])


def test_the_requests_and_the_grammar_of_the_docs_page_work(server):
    page = (Path(__file__).parents[3] / "docs/structured-output.md").read_text()
    requests = re.findall(r"curl [^\n]*/v1/(\S+) [^`]*?-d '(\{.*?\})'", page, flags=re.DOTALL)
    said = []
    for path, body in requests:
        answer = ask(
            server, f"/v1/{path}", **{**json.loads(body), "model": "tiny", "max_tokens": 500, "seed": 1}
        )
        [choice] = answer.json()["choices"]
        assert choice["finish_reason"] == "stop"
        said.append(choice.get("text") or choice["message"]["content"])
    assert json.loads(said[0]).keys() == {"legs"}
    assert re.fullmatch(r"[0-2]\d:[0-5]\d", said[1])
    [grammar] = re.findall(r"```ebnf\n(.*?)```", page, flags=re.DOTALL)
    assert accepts("grammar", grammar, "1+(22+3)") and not accepts("grammar", grammar, "1+")
