"""The API as clients see it: one server, openai-python without retries, and raw sockets where it matters."""

import asyncio
import json
import socket
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.conftest import KEY

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me something."}]}
FIXED = {"max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
RAW = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(server):
    with server.client(KEY) as client:
        yield client


def ask(server, path="/v1/chat/completions", **fields):
    base = CHAT if path.endswith("chat/completions") else {"model": "tiny", "prompt": "Once"}
    return server.post(path, {**base, **RAW, **fields}, key=KEY)


def events_of(response):
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_chat_completion_has_openai_s_format(client):
    answer = client.chat.completions.create(**CHAT, **FIXED)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_streamed_chat_has_the_same_text_as_a_non_streamed_one(client):
    whole = client.chat.completions.create(**CHAT, **FIXED)
    chunks = list(client.chat.completions.create(**CHAT, **FIXED, stream=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_chunks_follow_openai_s_conventions(server):
    events = events_of(ask(server, stream=True, stream_options={"include_usage": True}))
    *chunks, last, usage = events
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(event["choices"][0]["finish_reason"] is None for event in chunks)
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert all(event["usage"] is None for event in [*chunks, last])
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("include", [{}, {"include_usage": True}])  # the latter is what guidellm sends
def test_with_continuous_usage_stats_every_chunk_counts_its_answer_s_tokens(server, path, include):
    options = {"stream_options": {"continuous_usage_stats": True, **include}}
    *chunks, last = events_of(ask(server, path, stream=True, n=2, **options))
    for index in range(2):
        mine = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in mine]
        assert counts == sorted(counts) and counts[-1] == 12
        assert {usage["prompt_tokens"] for usage in mine} == {last["usage"]["prompt_tokens"]}
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 24


def test_without_include_usage_no_chunk_mentions_usage(server):
    assert all("usage" not in event for event in events_of(ask(server, stream=True)))


def test_streamed_and_non_streamed_completions_agree_for_several_prompts_and_n(client):
    request = {"model": "tiny", "prompt": ["Once", "Never"], "n": 2, "seed": 3, "temperature": 1.0}
    request |= {"max_tokens": 10, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**request)
    texts = {}
    for chunk in client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert {choice.index: choice.text for choice in whole.choices} == texts
    assert len(texts) == 4
    assert texts[0] != texts[1], "the answers of one prompt have seeds of their own"


def test_equal_seeds_repeat_an_answer_and_different_seeds_differ(server):
    def text(**fields):
        return ask(server, "/v1/completions", temperature=1.5, **fields).json()["choices"][0]["text"]

    assert text(seed=1) == text(seed=1)
    assert text(seed=1) != text(seed=2)


def test_a_stop_string_ends_the_text_before_it(server):
    full = ask(server, "/v1/completions", max_tokens=30).json()["choices"][0]["text"]
    stop = full[10:13]
    for stream in (False, True):
        response = ask(server, "/v1/completions", max_tokens=30, stop=stop, stream=stream)
        if stream:
            choices = [choice for event in events_of(response) for choice in event["choices"]]
            text, reason = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
        else:
            (choice,) = response.json()["choices"]
            text, reason = choice["text"], choice["finish_reason"]
        assert text == full[: full.index(stop)]
        assert reason == "stop"


def numbers(token):
    """Its logprob, and those of the most likely ones. Steps of other sizes round them in other ways."""
    return [token["logprob"], *(other["logprob"] for other in token["top_logprobs"])]


def test_streamed_and_non_streamed_logprobs_agree(server):
    fields = {"logprobs": True, "top_logprobs": 2}
    whole = ask(server, **fields).json()["choices"][0]["logprobs"]["content"]
    streamed = [
        token
        for event in events_of(ask(server, stream=True, **fields))
        for choice in event["choices"]
        if choice["logprobs"]
        for token in choice["logprobs"]["content"]
    ]
    assert len(whole) == 12
    assert [token["token"] for token in streamed] == [token["token"] for token in whole]
    assert [numbers(token) for token in streamed] == [pytest.approx(numbers(token)) for token in whole]
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in whole)
    assert all(token["top_logprobs"][0]["logprob"] == token["logprob"] for token in whole), "greedy"


def test_completion_logprobs_have_the_legacy_format(server):
    logprobs = ask(server, "/v1/completions", logprobs=2).json()["choices"][0]["logprobs"]
    assert {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {
        12
    }


def test_echo_prepends_the_prompt(server):
    plain = ask(server, "/v1/completions").json()["choices"][0]["text"]
    assert ask(server, "/v1/completions", echo=True).json()["choices"][0]["text"] == "Once" + plain


def test_many_concurrent_clients_each_get_their_own_answer(server):
    async def all_at_once():
        async with server.async_client(KEY) as client:
            calls = [
                client.completions.create(model="tiny", prompt=f"Number {i % 8}", **FIXED) for i in range(32)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    texts = asyncio.run(all_at_once())
    assert [texts[i] for i in range(8)] * 4 == texts
    assert len(set(texts)) > 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 1000}, "n"),
        ({"logit_bias": {"1": 500}}, "logit_bias"),
        ({"surprise": 1}, "surprise"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"stream": True, "max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ],
)
def test_an_invalid_request_is_a_400_in_json_that_names_the_field(server, fields, param):
    response = ask(server, **fields)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_a_prompt_that_can_never_fit_is_refused_with_a_reason(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="x" * 5000, max_tokens=1)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


def test_a_chat_that_can_never_fit_is_refused_by_the_name_of_its_own_field(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 5000}])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


def test_an_unknown_model_is_a_404_that_names_the_known_ones(client):
    with pytest.raises(openai.NotFoundError, match="tiny, alias") as refused:
        client.chat.completions.create(model="gpt-9", messages=CHAT["messages"])
    assert refused.value.code == "model_not_found"


def test_every_served_name_is_listed_and_works(client):
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    assert client.completions.create(model="alias", prompt="x", max_tokens=1).model == "alias"


def test_tokenize_and_detokenize_are_inverse(server):
    text = "Grüße, 世界"
    tokens = server.post("/tokenize", {"prompt": text}, key=KEY).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}, key=KEY).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": CHAT["messages"]}, key=KEY).json()
    answer = ask(server).json()
    assert chat["count"] == answer["usage"]["prompt_tokens"]


def test_health_and_metrics_are_public(server):
    health = httpx.get(server.url + "/health")
    assert health.status_code == 200
    assert health.json()["status"] == "healthy"
    assert health.json()["checks"] == {
        "gpu_available": None,
        "model_loaded": True,
        "memory_ok": True,
        "queue_ok": True,
        "progress_ok": True,
    }
    assert httpx.get(server.url + "/metrics").status_code == 200


def test_metrics_count_requests_and_tokens_under_our_names_and_vllm_s(server):
    before = server.metric("llm_requests_total", status="success")
    generated = server.metric("llm_tokens_generated_total")
    ask(server)
    assert server.metric("llm_requests_total", status="success", model="tiny") == before + 1
    assert server.metric("llm_tokens_generated_total") == generated + 12
    for ours, alias in (
        ("llm_tokens_generated_total", "vllm:generation_tokens_total"),
        ("llm_ttft_seconds_count", "vllm:time_to_first_token_seconds_count"),
        ("llm_request_latency_seconds_count", "vllm:e2e_request_latency_seconds_count"),
        ("llm_queue_depth", "vllm:num_requests_waiting"),
        ("llm_kv_cache_utilization", "vllm:kv_cache_usage_perc"),
    ):
        assert server.metric(ours) == server.metric(alias)


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_s_request_is_aborted(server, stream):
    def aborted():
        return (
            server.metric("llm_requests_total", status="aborted"),
            server.metric("vllm:request_success_total", finished_reason="abort"),
        )

    requests, answers = aborted()
    body = json.dumps({**CHAT, **RAW, "max_tokens": 1500, "stream": stream}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"X-Request-Id: hung-up-{stream}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        server.wait("it runs", lambda: server.metric("vllm:num_requests_running") == 1)
        begun = server.metric("llm_tokens_generated_total") + 5
        server.wait("it speaks", lambda: server.metric("llm_tokens_generated_total") > begun)
    server.wait("it was aborted", lambda: aborted() == (requests + 1, answers + 1))
    server.wait("nothing runs", lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("llm_active_requests") == 0
    (line,) = [line for line in server.log.read_text().splitlines() if f'"hung-up-{stream}"' in line]
    assert json.loads(line)["completion_tokens"] > 5, "tokens that were not sent count as well"


def test_the_engine_s_openmp_threads_spin_for_a_bounded_count(server):
    """Asleep, they cost a third of the speed; spinning without end, a pod that waits would cost CPUs."""
    environ = Path(f"/proc/{server.children()['engine']}/environ").read_bytes().decode().split("\0")
    (spins,) = (one.partition("=")[2] for one in environ if one.startswith("GOMP_SPINCOUNT="))
    assert 0 < int(spins) <= 100_000
