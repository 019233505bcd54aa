"""Overload as clients see it: one row, a short queue, a small cache, priorities, deadlines, limits by key."""

import concurrent.futures
import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import openai
import pytest

from tests.server.conftest import KEY
from tests.server.launch import Server

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me something."}], "temperature": 0}
LONG, SHORT = 1200, 4
OCCUPYING = 600  # tokens of the answer that others wait for


def start(tiny, directory, **flags):
    """A server with three keys whose cache holds 1,600 tokens."""
    keys = directory / "keys"
    keys.mkdir()
    for client in ("alice", "bob", "carol"):
        (keys / client).write_text(f"{client}\nhighest-priority: high\n")
    flags |= {"api_keys_dir": keys, "num_gpu_blocks_override": 100, "block_size": 16}
    flags |= {"scheduling_policy": "priority"}
    argv = [part for flag, value in flags.items() for part in ("--" + flag.replace("_", "-"), str(value))]
    return Server(tiny, directory, *argv)


@pytest.fixture(scope="module")
def narrow(tiny, tmp_path_factory):
    """Runs one request at a time and lets three wait, two of them with the same key."""
    directory = tmp_path_factory.mktemp("narrow")
    flags = {"max_num_seqs": 1, "max_num_queued_reqs": 3, "max_num_reqs_per_key": 2}
    with start(tiny, directory, **flags) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def wide(tiny, tmp_path_factory):
    """Has rows for more requests than its cache has room for."""
    with start(tiny, tmp_path_factory.mktemp("wide"), max_num_seqs=16) as server:
        yield server.wait_ready()


def ask(server, client, num_tokens=SHORT, **more):
    body = {**CHAT, "max_tokens": num_tokens, "ignore_eos": True, **more}
    return server.post("/v1/chat/completions", body, key=client)


def complete(server, client, prompt, num_tokens=SHORT, **more):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, **more}
    return server.post("/v1/completions", body, key=client)


@contextlib.contextmanager
def busy(server, client="bob", is_whole=False, **more):
    """An answer occupies the only row while the block runs; yields the list of its texts. At the end of the
    block it is aborted, or waited for with ``is_whole``.
    """
    begun, ended, texts = threading.Event(), threading.Event(), []

    def read():
        with server.client(client) as api:
            body = {"extra_body": {"ignore_eos": True, **more}, "stream": True, "max_tokens": OCCUPYING}
            with api.chat.completions.create(**CHAT, **body) as chunks:
                for chunk in chunks:
                    texts.append(chunk.choices[0].delta.content or "")
                    begun.set()
                    if ended.is_set() and not is_whole:
                        return  # which aborts it

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    try:
        yield texts
    finally:
        ended.set()
        thread.join(60)
        # The engine says that it is done a moment after the API process is.
        counts = "llm_active_requests", "llm_running_requests", "llm_queue_depth"
        server.wait("its row and blocks are free", lambda: not any(map(server.metric, counts)))


def test_a_deadline_that_passes_in_the_queue_is_a_503_and_removes_the_request(narrow):
    with busy(narrow):
        answer = ask(narrow, "alice", timeout=0.05)
        assert narrow.metric("llm_active_requests") == 1
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert int(answer.headers["retry-after"]) >= 1
    assert narrow.metric("llm_requests_refused_total", reason="deadline_exceeded") >= 1


def test_a_deadline_during_generation_ends_the_answer_with_finish_reason_length(narrow):
    began = time.monotonic()
    ask(narrow, "alice", LONG)
    quarter = (time.monotonic() - began) / 4  # of what a whole answer takes
    answer = ask(narrow, "alice", LONG, timeout=quarter).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert 0 < answer["usage"]["completion_tokens"] < LONG
    stream = ask(narrow, "alice", LONG, timeout=quarter, stream=True).text.split("\n\n")
    assert json.loads(stream[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert stream[-2] == "data: [DONE]"
    assert narrow.metric("llm_deadline_cut_answers_total") >= 2
    narrow.wait("the engine is free", lambda: narrow.metric("llm_running_requests") == 0)


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


@pytest.mark.deep
def test_queued_prompts_are_not_refused_for_memory_pressure(narrow):
    prompts = {"alice": [7] * 600, "carol": [8] * 600}
    with busy(narrow, "bob"), concurrent.futures.ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(complete, narrow, client, prompts[client]) for client in (*prompts, "alice")]
        assert [one.result().status_code for one in waiting] == [200, 200, 200]


@pytest.mark.deep
def test_memory_pressure_is_a_503_for_normal_priority_and_high_priority_is_served(wide):
    prompt, before = [7] * 1500, memory_refusals(wide)
    with busy(wide, "bob", priority="low"):
        refused = complete(wide, "alice", prompt)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "memory_pressure")
        assert int(refused.headers["retry-after"]) >= 1
        assert complete(wide, "alice", prompt, priority="high").status_code == 200
    assert complete(wide, "alice", prompt).status_code == 200, "alone it may fill the cache"
    assert memory_refusals(wide) == before + 1


def memory_refusals(server):
    name = "llm_requests_refused_total"
    return server.metric(name, reason="memory_pressure")


@pytest.mark.deep
def test_a_burst_within_one_step_is_admitted_as_far_as_the_cache_has_room_for_its_answers(wide):
    prompt, length, num_fitting = [7] * 40, 360, 3  # of 400 tokens each
    for _ in range(3):  # so that it is known how long such answers are
        assert complete(wide, "alice", prompt, length).status_code == 200
    preemptions, engine = wide.metric("llm_preemptions_total"), wide.children()["engine"]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        os.kill(engine, signal.SIGSTOP)
        try:
            wide.wait("the engine is stopped", lambda: is_stopped(engine))
            burst = [pool.submit(complete, wide, "alice", [n, *prompt[1:]], length) for n in range(12)]
            wide.wait("the others have their answer", lambda: sum(one.done() for one in burst) >= 9)
            assert is_stopped(engine) and wide.metric("llm_active_requests") == num_fitting
        finally:
            os.kill(engine, signal.SIGCONT)
        answers = [one.result() for one in burst]
    refused = [answer.json()["error"]["code"] for answer in answers if answer.status_code != 200]
    assert refused == ["memory_pressure"] * (12 - num_fitting)
    assert wide.metric("llm_preemptions_total") == preemptions


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("is_busy", [False, True])
def test_answers_that_can_never_fit_the_kv_cache_together_are_a_400(wide, is_busy):
    with busy(wide, "bob") if is_busy else contextlib.nullcontext():
        refused = complete(wide, "alice", [7] * 1424, n=16)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "n"
    assert (
        "1664 tokens" in error["message"] and "holds 1600" in error["message"] and "n=12" in error["message"]
    )
    many = complete(wide, "alice", [[7] * 900, [7] * 800])
    assert (many.status_code, many.json()["error"]["param"]) == (400, "prompt")


def test_two_answers_to_a_prompt_of_more_than_half_of_the_kv_cache_are_given(narrow):
    assert len(complete(narrow, "alice", [7] * 900, n=2).json()["choices"]) == 2


@pytest.mark.deep
def test_a_high_priority_request_preempts_a_low_one_whose_answer_stays_the_same(narrow):
    with busy(narrow, "alice", is_whole=True) as undisturbed:
        pass
    before = narrow.metric("llm_preemptions_total")
    with busy(narrow, "alice", is_whole=True, priority="low") as texts:
        for _ in range(3):
            assert ask(narrow, "bob", priority="high").status_code == 200
        assert len(texts) < len(undisturbed), "the low one was to be still at work"
    assert narrow.metric("llm_preemptions_total") > before
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
