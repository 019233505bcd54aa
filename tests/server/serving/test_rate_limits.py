"""Rate limits of API keys over HTTP, and request ids."""

import json

import httpx
import openai
import pytest

from tests.server.launch import Server

ASK = {"model": "tiny", "prompt": "Once", "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def metered(tiny, tmp_path_factory):
    """A server where a key may ask for five requests and two hundred tokens a minute; each test its key."""
    directory = tmp_path_factory.mktemp("metered")
    (directory / "keys").mkdir()
    for client in ("alice", "bob", "carol", "dave"):
        (directory / "keys" / client).write_text(client)
    flags = ("--max-requests-per-minute-per-key", "5", "--max-tokens-per-minute-per-key", "200")
    with Server(tiny, directory, "--api-keys-dir", str(directory / "keys"), *flags) as server:
        yield server.wait_ready()


def test_requests_beyond_the_limit_of_a_key_get_a_429_and_other_keys_are_unaffected(metered):
    remaining = []
    for _ in range(5):
        answer = metered.post("/v1/completions", ASK, key="alice")
        assert answer.status_code == 200
        remaining.append(int(answer.headers["x-ratelimit-remaining-requests"]))
    assert remaining == [4, 3, 2, 1, 0]
    with metered.client("alice") as client, pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="tiny", prompt="Once", max_tokens=5)
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 12
    assert caught.value.code == "rate_limit_exceeded"
    assert metered.post("/v1/completions", ASK, key="bob").status_code == 200


def test_generated_tokens_count_towards_the_token_limit(metered):
    assert metered.post("/v1/completions", ASK | {"max_tokens": 400}, key="carol").status_code == 200
    answer = metered.post("/v1/completions", ASK, key="carol")
    assert answer.status_code == 429
    assert "tokens a minute" in answer.json()["error"]["message"]
    assert answer.headers["x-ratelimit-remaining-tokens"] == "0"


@pytest.mark.parametrize("given", ["my-request-1", None, "with space", "x" * 129, "ümlaut"])
def test_a_valid_request_id_is_returned_and_others_are_replaced(server, given):
    headers = [(b"x-request-id", given.encode())] if given else []
    answer = httpx.post(server.url + "/v1/completions", json=ASK, headers=headers)
    assert answer.status_code == 401
    sent_back = answer.headers["x-request-id"]
    assert (sent_back == given) == (given == "my-request-1")
    assert sent_back.isascii()


def test_the_log_line_of_a_request_has_its_id(metered):
    headers = {"authorization": "Bearer dave", "x-request-id": "find-me"}
    answer = httpx.post(metered.url + "/v1/completions", json=ASK, headers=headers)

    def line():
        lines = (json.loads(line) for line in metered.log.read_text().splitlines() if '"request"' in line)
        return next((line for line in lines if line.get("request_id") == "find-me"), None)

    found = metered.wait("the request is in the log", line)
    assert (found["client"], found["status"]) == ("dave", "success")
    assert answer.json()["id"] == f"cmpl-{found['response_id']}"
