"""Sampling defaults from the model's generation_config.json, and the threads that tokenize long texts."""

import asyncio
import dataclasses
import json
import threading
from typing import ClassVar

import pytest

from quire_http.errors import ApiError
from quire_server.api import routes
from quire_server.api.context import ServerContext
from quire_server.core.sampling_params import SamplingParams
from quire_server.errors import ModelCorruptError
from quire_server.model_dir.files import ModelFiles
from quire_server.model_dir.generation_config import SamplingDefaults, sampling_defaults


def defaults(tmp_path, **settings):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    return sampling_defaults(ModelFiles.open(tmp_path))


def test_without_generation_config_openai_s_defaults_are_used(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert sampling_defaults(ModelFiles.open(tmp_path)) == SamplingDefaults(
        SamplingParams(0, temperature=1.0, top_p=1.0, top_k=0)
    )


def test_settings_of_generation_config_are_used(tmp_path):
    settings = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "do_sample": True, "eos_token_id": 2}
    assert defaults(tmp_path, **settings) == SamplingDefaults(
        SamplingParams(0, temperature=0.6, top_p=0.9, top_k=40)
    )


def test_min_p_repetition_penalty_and_max_new_tokens_are_used(tmp_path):
    settings = {"min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 2048}
    found = defaults(tmp_path, **settings)
    assert (found.sampling.min_p, found.sampling.repetition_penalty, found.max_tokens) == (0.05, 1.1, 2048)


def test_do_sample_false_means_greedy_at_any_temperature(tmp_path):
    assert defaults(tmp_path, do_sample=False).sampling.temperature == 0.0
    assert defaults(tmp_path, do_sample=False, temperature=0.6).sampling.temperature == 0.0


@pytest.mark.parametrize("value", ["hot", -1, 1e9, True, [1]])
def test_an_invalid_default_is_a_corrupt_model(value, tmp_path):
    with pytest.raises(ModelCorruptError, match="temperature"):
        defaults(tmp_path, temperature=value)


LONG = "x" * 5000


class SlowTokenizer:
    """For texts that begin with "slow" it blocks until the test sets `go_on`."""

    vocab_size = 10

    def __init__(self):
        self.go_on = threading.Event()

    def encode(self, text, *, add_special_tokens):
        if text.startswith("slow"):
            self.go_on.wait()
        return [1]

    def least_tokens(self, text):
        return 0

    def decode(self, tokens, *, skip_special_tokens):
        self.go_on.wait()
        return "text"


class FakeExchange:
    def __init__(self, body, client=""):
        self._body = body
        self.client = client
        self.sent = None

    async def body(self, max_values):
        return json.dumps(self._body).encode()

    async def json(self, body):
        self.sent = body


class NoEngine:
    connected = False
    adapters: ClassVar = {}


@pytest.fixture
def context():
    parts = {
        field.name: None for field in dataclasses.fields(ServerContext) if not field.name.startswith("_")
    }
    for name in ("created", "text_gate", "body_memory"):
        del parts[name]
    context = ServerContext(**{**parts, "engine": NoEngine(), "tokenizer": SlowTokenizer()})
    yield context
    context.tokenizer.go_on.set()


async def test_tokenize_requests_do_not_delay_completions_and_are_bounded(context):
    exchanges = [FakeExchange({"prompt": "slow" + LONG}) for _ in range(32)]
    waiting = [asyncio.create_task(routes._tokenize(context, exchange)) for exchange in exchanges]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await routes._tokenize(context, FakeExchange({"prompt": "slow" + LONG}))
    assert refused.value.status == 503
    assert await asyncio.wait_for(context.tokenize(LONG, special=False, limit=9), 60) == (1,)
    context.tokenizer.go_on.set()
    await asyncio.gather(*waiting)
    assert all(exchange.sent["count"] == 1 for exchange in exchanges)
    await routes._tokenize(context, FakeExchange({"prompt": "short"}))


async def test_tokenize_requests_of_one_client_do_not_keep_out_another_one(context):
    exchanges = [FakeExchange({"prompt": "slow" + LONG}, "mallory") for _ in range(32)]
    waiting = [asyncio.create_task(routes._tokenize(context, exchange)) for exchange in exchanges]
    await asyncio.sleep(0)
    with pytest.raises(ApiError):
        await routes._tokenize(context, FakeExchange({"prompt": LONG}, "mallory"))
    await asyncio.wait_for(routes._tokenize(context, FakeExchange({"prompt": LONG}, "alice")), 60)
    context.tokenizer.go_on.set()
    await asyncio.gather(*waiting)


async def test_a_long_detokenization_does_not_block_the_event_loop(context):
    exchange = FakeExchange({"tokens": [1] * 5000})
    task = asyncio.create_task(routes._detokenize(context, exchange))
    await asyncio.sleep(0.05)
    context.tokenizer.go_on.set()  # which is reached only if the event loop is not blocked
    await task
    assert exchange.sent == {"prompt": "text"}


async def test_a_body_that_loads_a_conversation_is_parsed_by_a_thread(context):
    async def thread_of(body):
        return await context.read(FakeExchange(body), lambda values: threading.current_thread())

    assert await thread_of({"input": "a"}) is threading.main_thread()
    assert await thread_of({"input": "a", "previous_response_id": "resp_1"}) is not threading.main_thread()
