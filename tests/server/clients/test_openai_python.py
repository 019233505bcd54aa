"""openai-python without retries: what it makes of answers, of streams, and of each kind of error."""

import asyncio

import openai
import pytest

from tests.server.clients.conftest import MODEL
from tests.server.conftest import KEY
from tests.server.launch import Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ASK = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
CHAT = {"model": "tiny", "messages": QUESTION, "temperature": 0, "extra_body": {"ignore_eos": True}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def client(smollm2_server):
    with smollm2_server.client() as client:
        yield client


@pytest.fixture(scope="module")
def limited_server(tiny, tmp_path_factory):
    """A server with one row and one place to wait, where a key may ask for three requests a minute."""
    directory = tmp_path_factory.mktemp("limited_server")
    keys = directory / "keys"
    keys.mkdir()
    for name in ("alice", "bob", "carol"):
        (keys / name).write_text(name)
    flags = ["--api-keys-dir", str(keys), "--max-requests-per-minute-per-key", "3"]
    with Server(tiny, directory, *flags, "--max-num-seqs", "1", "--max-num-queued-reqs", "1") as server:
        yield server.wait_ready()


def test_a_second_question_uses_the_history(client):
    answer = client.chat.completions.create(**ASK)
    (choice,) = answer.choices
    assert "Paris" in choice.message.content
    assert (choice.message.role, choice.finish_reason, choice.logprobs) == ("assistant", "stop", None)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    more = [*QUESTION, choice.message, {"role": "user", "content": "In which country is that?"}]
    again = client.chat.completions.create(**{**ASK, "messages": more})
    assert "France" in again.choices[0].message.content


def test_a_stream_has_the_text_logprobs_and_usage_of_the_unstreamed_answer(client):
    asked = {**ASK, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked)
    *chunks, usage = client.chat.completions.create(**asked, **USAGE)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    entries = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert [token.token for token in entries] == [one.token for one in whole.choices[0].logprobs.content]
    assert b"".join(bytes(token.bytes) for token in entries).decode() == whole.choices[0].message.content
    assert all(token.logprob == token.top_logprobs[0].logprob for token in entries)
    assert all(len(token.top_logprobs) == 3 for token in entries)
    assert usage.choices == [] and usage.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks)


def test_the_streaming_helper_returns_the_whole_answer(client):
    with client.chat.completions.stream(**ASK, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**ASK)
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_concurrent_asynchronous_calls_return_the_same_answer(smollm2_server, client):
    whole = client.chat.completions.create(**ASK).choices[0].message.content

    async def streamed(api):
        parts = await api.chat.completions.create(**ASK, stream=True)
        return "".join([one.delta.content or "" async for chunk in parts for one in chunk.choices])

    async def session():
        async with smollm2_server.async_client() as api:
            answers = (streamed(api), streamed(api), api.chat.completions.create(**ASK))
            *texts, answer = await asyncio.gather(*answers)
            return [*texts, answer.choices[0].message.content], [one.id async for one in api.models.list()]

    assert asyncio.run(session()) == ([whole] * 3, [MODEL])


def test_completions_echo_the_prompt_with_its_logprobs(client):
    prompts = ["The capital of France is", "Two plus two makes"]
    asked = {"model": MODEL, "prompt": prompts, "max_tokens": 4, "temperature": 0, "echo": True}
    answer = client.completions.create(**asked, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.text.startswith(prompt)
        assert choice.finish_reason == "length"
        entries = choice.logprobs
        assert "".join(entries.tokens) == choice.text
        assert entries.token_logprobs[0] is None and max(entries.token_logprobs[1:]) <= 0
        for offset, token in zip(entries.text_offset, entries.tokens, strict=True):
            assert choice.text[offset:].startswith(token)
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in answer.choices]


def test_fields_that_openai_does_not_have_are_passed_by_extra_body(client):
    plain = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 1.0, "seed": 1}
    greedy = client.completions.create(**{**plain, "temperature": 0}).choices[0].text
    assert client.completions.create(**plain, extra_body={"top_k": 1}).choices[0].text == greedy


@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_request_raises_an_exception_that_names_the_field(client, stream):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**ASK, "temperature": 7, "stream": stream})
    error = refused.value
    assert (error.status_code, error.param, error.type) == (400, "temperature", "invalid_request_error")
    assert "between 0 and 2" in error.message
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASK, stream=stream, extra_body={"top_kk": 5})
    assert refused.value.param == "top_kk"


def test_a_wrong_key_and_a_wrong_model_raise_their_own_exceptions(server):
    with server.client("unknown-key") as client, pytest.raises(openai.AuthenticationError) as refused:
        client.models.list()
    assert (refused.value.code, refused.value.status_code) == ("invalid_api_key", 401)
    with server.client(KEY) as client, pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-9")
    assert refused.value.code == "model_not_found"


def test_an_exceeded_limit_raises_a_rate_limit_error_with_retry_after(limited_server):
    with limited_server.client("alice") as client:
        for _ in range(3):
            client.chat.completions.create(**CHAT, max_tokens=2)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**CHAT, max_tokens=2)
    assert refused.value.code == "rate_limit_exceeded"
    assert int(refused.value.response.headers["retry-after"]) >= 1


def test_a_full_queue_is_a_503_and_earlier_requests_are_answered(limited_server):
    with limited_server.client("bob") as bob, limited_server.client("carol") as carol:
        stream = bob.chat.completions.create(**CHAT, n=2, max_tokens=600, **USAGE)  # one runs and one waits
        next(stream)
        with pytest.raises(openai.APIStatusError) as refused:
            carol.chat.completions.create(**CHAT, max_tokens=2)
        *_, usage = stream
    assert refused.value.status_code == 503
    assert refused.value.code == "queue_full"
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert usage.usage.completion_tokens == 1200


def test_answers_streams_and_errors_have_the_given_request_id(client):
    def headers(name):
        return {"x-request-id": name}

    raw = client.chat.completions.with_raw_response.create(**ASK, extra_headers=headers("mine-1"))
    assert (raw.status_code, raw.request_id, raw.headers["x-request-id"]) == (200, "mine-1", "mine-1")
    assert raw.parse()._request_id == "mine-1"
    streaming = client.chat.completions.with_streaming_response
    with streaming.create(**ASK, stream=True, extra_headers=headers("mine-2")) as raw:
        assert raw.request_id == "mine-2"
        assert [line for line in raw.iter_lines() if line][-1] == "data: [DONE]"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**ASK, "n": 0}, extra_headers=headers("mine-3"))
    assert refused.value.request_id == "mine-3"
    own = {client.chat.completions.create(**ASK)._request_id for _ in range(2)}
    assert len(own) == 2 and all(own)
