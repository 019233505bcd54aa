"""What the model's generation_config.json says about sampling, and who may use the threads for texts."""

import asyncio
import dataclasses
import json
import threading

import pytest

from quire_server.api import public
from quire_server.api.errors import ApiError
from quire_server.api.house import House
from quire_server.api.sampling_defaults import SamplingDefaults, sampling_defaults
from quire_server.core.errors import ModelCorruptError
from quire_server.core.model_files import ModelFiles


def defaults(tmp_path, **settings):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    return sampling_defaults(ModelFiles.open(tmp_path))


def test_without_the_file_openai_s_defaults_hold(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert sampling_defaults(ModelFiles.open(tmp_path)) == SamplingDefaults(1.0, 1.0, 0)


def test_what_is_set_is_honoured(tmp_path):
    settings = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "do_sample": True, "eos_token_id": 2}
    assert defaults(tmp_path, **settings) == SamplingDefaults(0.6, 0.9, 40)


def test_all_that_a_model_may_say_of_sampling_is_taken(tmp_path):
    settings = {"min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 2048}
    found = defaults(tmp_path, **settings)
    assert (found.min_p, found.repetition_penalty, found.max_tokens) == (0.05, 1.1, 2048)


def test_a_model_that_does_not_sample_is_greedy_whatever_its_temperature(tmp_path):
    assert defaults(tmp_path, do_sample=False).temperature == 0.0
    assert defaults(tmp_path, do_sample=False, temperature=0.6).temperature == 0.0


@pytest.mark.parametrize("value", ["hot", -1, 1e9, True, [1]])
def test_a_default_that_makes_no_sense_is_a_corrupt_model(value, tmp_path):
    with pytest.raises(ModelCorruptError, match="temperature"):
        defaults(tmp_path, temperature=value)


LONG = "x" * 5000


class SlowTokenizer:
    """Takes as long as it is told to for texts that begin with "slow"."""

    vocab_size = 10

    def __init__(self):
        self.go_on = threading.Event()

    def encode(self, text, *, add_special_tokens):
        if text.startswith("slow"):
            self.go_on.wait()
        return [1]

    def decode(self, tokens, *, skip_special_tokens):
        self.go_on.wait()
        return "text"


class FakeReply:
    def __init__(self, body):
        self._body = body
        self.told = None

    async def body(self):
        return json.dumps(self._body).encode()

    async def json(self, body):
        self.told = body


class NoEngine:
    connected = False


@pytest.fixture
def house():
    parts = {field.name: None for field in dataclasses.fields(House) if not field.name.startswith("_")}
    del parts["created"], parts["side_door"], parts["grammar_door"]
    house = House(**{**parts, "engine": NoEngine(), "tokenizer": SlowTokenizer()})
    yield house
    house.tokenizer.go_on.set()


async def test_tokenising_for_its_own_sake_holds_up_no_completion_and_is_bounded(house):
    replies = [FakeReply({"prompt": "slow" + LONG}) for _ in range(32)]
    waiting = [asyncio.create_task(public.tokenize(house, reply)) for reply in replies]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await public.tokenize(house, FakeReply({"prompt": "slow" + LONG}))
    assert refused.value.status == 503
    assert await asyncio.wait_for(house.tokenize(LONG, special=False), 10) == (1,)
    house.tokenizer.go_on.set()
    await asyncio.gather(*waiting)
    assert all(reply.told["count"] == 1 for reply in replies)
    await public.tokenize(house, FakeReply({"prompt": "short"}))


async def test_a_long_detokenisation_leaves_the_event_loop_to_others(house):
    reply = FakeReply({"tokens": [1] * 5000})
    task = asyncio.create_task(public.detokenize(house, reply))
    await asyncio.sleep(0.05)
    house.tokenizer.go_on.set()  # were the loop blocked, nobody could
    await task
    assert reply.told == {"prompt": "text"}
