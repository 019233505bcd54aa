"""Overload as clients see it: one row, a short queue, priorities, deadlines, limits per key."""

import concurrent.futures
import contextlib
import json
import threading

import openai
import pytest

from tests.server.conftest import KEY
from tests.server.launch import Server

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me something."}], "temperature": 0}
LONG, SHORT = 1200, 4


@pytest.fixture(scope="module")
def narrow(tiny, tmp_path_factory):
    """A server that runs one request at a time and lets three wait, two of them with the same key; its cache
    holds 1,600 tokens.
    """
    directory = tmp_path_factory.mktemp("narrow")
    keys = directory / "keys"
    keys.mkdir()
    for client in ("alice", "bob", "carol"):
        (keys / client).write_text(f"{client}\nhighest-priority: high\n")
    flags = {
        "--api-keys-dir": keys,
        "--max-num-seqs": 1,
        "--num-gpu-blocks-override": 100,
        "--block-size": 16,
        "--max-num-queued-reqs": 3,
        "--max-num-reqs-per-key": 2,
        "--scheduling-policy": "priority",
    }
    argv = [str(part) for flag in flags.items() for part in flag]
    with Server(tiny, directory, *argv) as server:
        yield server.wait_ready()


def ask(server, client, num_tokens=SHORT, **more):
    body = {**CHAT, "max_tokens": num_tokens, "ignore_eos": True, **more}
    return server.post("/v1/chat/completions", body, key=client)


def complete(server, client, prompt, **more):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": SHORT, "ignore_eos": True, **more}
    return server.post("/v1/completions", body, key=client)


@contextlib.contextmanager
def busy(server, client="bob", **more):
    """A long answer occupies the only row; yields the list of its texts, which is complete afterwards."""
    begun, texts = threading.Event(), []

    def read():
        with server.client(client) as api:
            body = {"extra_body": {"ignore_eos": True, **more}, "stream": True, "max_tokens": LONG}
            for chunk in api.chat.completions.create(**CHAT, **body):
                texts.append(chunk.choices[0].delta.content or "")
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(20)
    try:
        yield texts
    finally:
        thread.join(60)


def test_a_deadline_that_passes_in_the_queue_is_a_503_and_removes_the_request(narrow):
    with busy(narrow):
        answer = ask(narrow, "alice", timeout=0.05)
        assert narrow.metric("llm_active_requests") == 1
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert int(answer.headers["retry-after"]) >= 1
    assert narrow.metric("llm_requests_refused_total", reason="deadline_exceeded") >= 1


def test_a_deadline_during_generation_ends_the_answer_with_finish_reason_length(narrow):
    answer = ask(narrow, "alice", LONG, timeout=0.3).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert 0 < answer["usage"]["completion_tokens"] < LONG
    stream = ask(narrow, "alice", LONG, timeout=0.3, stream=True).text.split("\n\n")
    assert json.loads(stream[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert stream[-2] == "data: [DONE]"
    assert narrow.metric("llm_deadline_cut_answers_total") >= 2
    narrow.wait("the engine is free", lambda: narrow.metric("llm_running_requests") == 0, 5)


def test_a_key_over_its_own_limit_is_a_429_and_others_are_served(narrow):
    with busy(narrow, priority="low"), concurrent.futures.ThreadPoolExecutor(2) as pool:
        queued = [pool.submit(ask, narrow, "alice", priority="low") for _ in range(2)]
        narrow.wait("both wait", lambda: narrow.metric("llm_active_requests") == 3)
        with narrow.client("alice") as api, pytest.raises(openai.RateLimitError) as refused:
            api.chat.completions.create(**CHAT)
        assert refused.value.response.headers["retry-after"]
        assert ask(narrow, "bob", priority="high").status_code == 200
        assert [one.result().status_code for one in queued] == [200, 200]
    assert narrow.metric("llm_requests_total", status="limited") == 1


def test_a_full_queue_is_a_503_with_retry_after(narrow):
    with busy(narrow, "alice"), concurrent.futures.ThreadPoolExecutor(1) as pool:
        queued = pool.submit(ask, narrow, "bob", n=2)
        narrow.wait("two wait", lambda: narrow.metric("llm_active_requests") == 3)
        refused = ask(narrow, "carol", n=2, priority="high")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert queued.result().status_code == 200
    assert narrow.metric("llm_requests_refused_total", reason="queue_full") == 1


def test_queued_prompts_are_not_refused_for_memory_pressure(narrow):
    prompts = {"alice": [7] * 600, "carol": [8] * 600}
    with busy(narrow, "bob"), concurrent.futures.ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(complete, narrow, client, prompts[client]) for client in (*prompts, "alice")]
        assert [one.result().status_code for one in waiting] == [200, 200, 200]


def test_memory_pressure_is_a_503_for_normal_priority_and_high_priority_is_served(narrow):
    prompt = [7] * 1500
    with busy(narrow, "bob", priority="low"):
        refused = complete(narrow, "alice", prompt)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "memory_pressure")
        assert int(refused.headers["retry-after"]) >= 1
        assert complete(narrow, "alice", prompt, priority="high").status_code == 200
    assert complete(narrow, "alice", prompt).status_code == 200
    assert narrow.metric("llm_requests_refused_total", reason="memory_pressure") == 1


@pytest.mark.parametrize("is_busy", [False, True])
def test_answers_that_can_never_fit_the_kv_cache_together_are_a_400(narrow, is_busy):
    with busy(narrow, "bob") if is_busy else contextlib.nullcontext():
        refused = complete(narrow, "alice", [7] * 900, n=2)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "n"
    assert (
        "1800 tokens" in error["message"] and "holds 1600" in error["message"] and "n=1" in error["message"]
    )
    many = complete(narrow, "alice", [[7] * 900, [7] * 800])
    assert (many.status_code, many.json()["error"]["param"]) == (400, "prompt")


def test_a_high_priority_request_preempts_a_low_one_whose_answer_stays_the_same(narrow):
    with busy(narrow, "alice") as undisturbed:
        pass
    before = narrow.metric("llm_preemptions_total")
    with busy(narrow, "alice", priority="low") as texts:
        for _ in range(3):
            assert ask(narrow, "bob", priority="high").status_code == 200
        assert len(texts) < len(undisturbed), "the low one was to be still at work"
    assert narrow.metric("llm_preemptions_total") >= before + 3
    assert "".join(texts) == "".join(undisturbed)


@pytest.mark.parametrize("priority", ["urgent", 101, -101, 1.5, True])
def test_an_unknown_priority_is_a_400(narrow, priority):
    answer = ask(narrow, "alice", priority=priority)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


def test_a_priority_is_refused_without_the_priority_scheduling_policy(server):
    assert ask(server, KEY, priority="normal").status_code == 200
    answer = ask(server, KEY, priority="high")
    assert answer.status_code == 400 and "--scheduling-policy priority" in answer.json()["error"]["message"]


def test_no_kv_block_is_unaccounted_for(narrow):
    assert narrow.metric("llm_kv_blocks_unaccounted") == 0
    narrow.wait("no request is left", lambda: narrow.metric("llm_active_requests") == 0)
    assert narrow.metric("llm_queued_prompt_tokens") == 0
