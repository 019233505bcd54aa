"""Answers that are cut by a deadline or by a lack of memory, and how they are marked."""

import asyncio
import json
import resource
from pathlib import Path

import httpx
import pytest

from tests.server.launch import Server

LONG = {"model": "tiny", "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory):
    flags = ("--max-num-batched-tokens", "2048", "--no-enable-prefix-caching")
    with Server(tiny, tmp_path_factory.mktemp("degraded"), *flags) as server:
        yield server.wait_ready()


def degraded(server, reason):
    return server.metric("llm_degraded_requests_total", reason=reason)


def test_an_answer_cut_by_its_deadline_is_marked_as_degraded(served):
    before = degraded(served, "deadline")
    answer = served.post("/v1/completions", LONG | {"timeout": 0.2})
    assert answer.headers["x-quire-degraded"] == "deadline"
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert degraded(served, "deadline") == before + 1
    whole = served.post("/v1/completions", LONG | {"max_tokens": 3})
    assert "x-quire-degraded" not in whole.headers


def test_a_retry_on_timeout_halves_max_tokens_and_is_marked_as_degraded(served):
    """The first try takes the time for which it waits; the second one begins with what it said."""
    before = degraded(served, "halved_max_tokens")
    tries = [served.post("/v1/completions", LONG | {"max_tokens": 600}) for _ in range(2)]
    whole, took = tries[0], min(one.elapsed.total_seconds() for one in tries)  # a busy machine is slower once
    ask = LONG | {"max_tokens": 600, "timeout": took / 2, "retry_on_timeout": True}
    answer = served.post("/v1/completions", ask)
    assert answer.headers["x-quire-degraded"].split(", ")[0] == "halved_max_tokens"
    assert degraded(served, "halved_max_tokens") == before + 1
    text = answer.json()["choices"][0]["text"].rstrip("\ufffd")  # a character that the end cut
    assert text and whole.json()["choices"][0]["text"].startswith(text)
    assert answer.json()["usage"]["completion_tokens"] <= 300


def test_a_stream_that_has_begun_is_not_retried(served):
    before = degraded(served, "halved_max_tokens")
    ask = LONG | {"timeout": 0.3, "retry_on_timeout": True, "stream": True}
    with httpx.stream("POST", served.url + "/v1/completions", json=ask, timeout=60) as stream:
        events = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    assert json.loads(events[-1])["choices"][0]["finish_reason"] == "length"
    assert degraded(served, "halved_max_tokens") == before


async def test_out_of_memory_fails_only_the_request_that_caused_it(tiny, tmp_path):
    """The engine gets a real limit just above what it has; a long prompt is too much for it."""
    flags = ("--max-num-batched-tokens", "2048", "--no-enable-prefix-caching")
    neighbour = LONG | {"max_tokens": 400}
    with Server(tiny, tmp_path, *flags) as server:
        server.wait_ready()
        alone = server.post("/v1/completions", neighbour).json()["choices"][0]["text"]
        engine = server.children()["engine"]
        address_space = int(Path(f"/proc/{engine}/statm").read_text().split()[0]) * resource.getpagesize()
        limit = address_space + (1 << 20)
        resource.prlimit(engine, resource.RLIMIT_AS, (limit, limit))
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            small = asyncio.create_task(client.post("/v1/completions", json=neighbour))
            await asyncio.sleep(0.05)
            greedy = {"model": "tiny", "prompt": "y" * 2000, "max_tokens": 4, "prompt_logprobs": 20}
            large = await client.post("/v1/completions", json=greedy)
            answer = await small
        assert (large.status_code, large.json()["error"]["code"]) == (503, "out_of_memory"), large.text[:300]
        assert large.headers["x-quire-degraded"] == "out_of_memory"
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == alone
        assert degraded(server, "out_of_memory") == 1
        assert server.process.poll() is None and server.children()["engine"] == engine
