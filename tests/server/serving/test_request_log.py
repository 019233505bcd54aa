"""The request log and token times, which are off unless enabled."""

import json
import logging

import httpx
import pytest

from quire_server.api.request_log import RequestLog, RequestLogging
from tests.server.conftest import KEY

ASK = {"model": "tiny", "prompt": "my card is 4111-1111 thanks", "max_tokens": 6, "ignore_eos": True}
TIMED = {"x-quire-token-timing": "true"}


def logged(server, answer):
    def line():
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if '"request"' in line]
        wanted = answer.headers["x-request-id"]
        return next((line for line in lines if line.get("request_id") == wanted), None)

    return server.wait("the request's line", line)


def test_logged_content_is_redacted_and_then_truncated(keyless):
    answer = keyless.post("/v1/completions", ASK | {"temperature": 0})
    line = logged(keyless, answer)
    assert line["prompt"] == "my card is [redacted] thanks"
    assert line["answer"] == answer.json()["choices"][0]["text"][:30]
    long = keyless.post("/v1/completions", ASK | {"prompt": "x" * 28 + "4111-1111"})
    assert logged(keyless, long)["prompt"] == "x" * 28 + "[r", "a cut went through what is to be hidden"


def test_prompts_of_token_ids_are_logged_as_redacted_text(keyless):
    tokens = keyless.post("/tokenize", {"prompt": ASK["prompt"]}).json()["tokens"]
    answer = keyless.post("/v1/completions", ASK | {"prompt": [tokens, tokens]})
    assert logged(keyless, answer)["prompt"] == "my card is [redacted] thanks\nm"


def test_a_chat_is_logged_with_its_roles(keyless):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    assert logged(keyless, keyless.post("/v1/chat/completions", body))["prompt"] == "user: Hello"


def test_by_default_the_log_has_no_prompt_and_no_answer(server):
    secret = "swordfish-4711"
    answer = server.post("/v1/completions", ASK | {"prompt": secret, "max_tokens": 30}, key=KEY)
    assert not {"prompt", "answer"} & logged(server, answer).keys()
    chat = {"model": "tiny", "messages": [{"role": "user", "content": secret}], "max_tokens": 3}
    for body in (chat, chat | {"surprise": secret}, chat | {"messages": secret}, chat | {"user": [secret]}):
        logged(server, server.post("/v1/chat/completions", body, key=KEY))
    assert secret not in server.log.read_text()


@pytest.mark.parametrize("mode", list(RequestLogging))
def test_log_mode_off_writes_no_line_and_only_content_mode_has_a_transcript(mode, caplog):
    caplog.set_level(logging.INFO)
    log = RequestLog(mode)
    transcript = log.open(str)
    assert (transcript is not None) == (mode is RequestLogging.CONTENT)
    log.write({"path": "/v1/completions"}, transcript)
    assert len(caplog.records) == (mode is not RequestLogging.OFF)


def ask(server, headers, **fields):
    return httpx.post(server.url + "/v1/completions", json=ASK | fields, headers=headers, timeout=60)


def test_token_times_are_returned_on_request(keyless):
    (choice,) = ask(keyless, TIMED).json()["choices"]
    times = choice["quire_timing"]["token_ms"]
    assert len(times) == 6 and times[0] > 0 and times == sorted(times)
    assert "quire_timing" not in ask(keyless, {}).json()["choices"][0]


def test_a_stream_returns_the_time_of_every_token_on_request(keyless):
    text = ask(keyless, TIMED, stream=True).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    times = [
        at
        for event in events
        for choice in event["choices"]
        for at in choice.get("quire_timing", {"token_ms": []})["token_ms"]
    ]
    assert len(times) == 6 and times == sorted(times)


def test_openai_python_ignores_token_times(keyless):
    with keyless.client() as client:
        answer = client.completions.create(model="tiny", prompt="Once", max_tokens=3, extra_headers=TIMED)
    assert answer.choices[0].text is not None


def test_an_invalid_token_timing_header_is_a_400_that_names_it(keyless):
    answer = ask(keyless, {"x-quire-token-timing": "yes"})
    assert answer.status_code == 400
    assert "x-quire-token-timing" in answer.json()["error"]["message"]
