"""The door comes before all work: whoever is refused has cost nothing, and pays nothing."""

import asyncio
import json
import time

import pytest

from quire_server.api import completions
from quire_server.api.admission import Admission, Limits, Newcomer
from quire_server.api.drain import Drain, DrainLimits
from quire_server.api.house import House
from quire_server.api.rates import RateLimits, Rates
from quire_server.api.reply import Reply
from quire_server.api.sampling_defaults import SamplingDefaults
from quire_server.engine.messages import EngineInfo, EngineStats
from quire_server.metrics import Metrics

INFO = EngineInfo(max_model_len=1000, vocab_size=9, num_blocks=100, block_size=10, max_num_seqs=2)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "word " * 40}]}
COMPLETION = {"model": "m", "prompt": "word " * 40, "structured_outputs": {"choice": ["a", "b"]}}
ROUTES = {
    "/v1/chat/completions": (completions.chat, CHAT),
    "/v1/completions": (completions.complete, COMPLETION),
}


class Engine:
    info = INFO
    stats = EngineStats()


class Spy:
    """Stands for the tokenizer, the template and the grammar compiler, and does none of their work."""

    vocab_size = 9
    eos_token_ids = (8,)

    def __init__(self):
        self.calls = []

    def encode(self, text, **_):
        self.calls.append("encode")
        return [1] * 60

    def decode(self, tokens, **_):
        self.calls.append("decode")

    def render(self, messages):
        self.calls.append("render")
        return "text"

    def known(self, form):
        self.calls.append("compile")


def make_house(limits=None, stats=None, **rates):
    spy, engine = Spy(), Engine()
    engine.stats = stats or EngineStats()
    metrics = Metrics("m")
    return House(
        served_names=("m",),
        engine=engine,
        tokenizer=spy,
        template=spy,
        grammars=spy,
        defaults=SamplingDefaults(),
        metrics=metrics,
        admission=Admission(limits or Limits(max_queued=4), time.monotonic, metrics.admitted),
        drain=Drain(DrainLimits(1, 0), time.monotonic),
        keys=None,
        state=None,
        thresholds=None,
        deep_check=None,
        rates=Rates(RateLimits(**rates), lambda: 0.0),
    )


def fill(house, num_answers, prompt_tokens=0):
    house.admission.reserve(
        Newcomer("somebody", num_answers, prompt_tokens, priority=-1), INFO, house.engine.stats
    )


async def ask(house, path):
    """(status, body) of the answer to a request by HTTP, without the HTTP."""
    handle, body = ROUTES[path]
    sent = []

    incoming = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})

    async def send(message):
        sent.append(message)

    scope = {"path": path, "headers": [], "quire.client": "ann"}
    await handle(house, Reply(scope, incoming.get, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def remaining(house):
    return {
        name.removeprefix("x-ratelimit-remaining-"): int(value)
        for name, value in house.rates.headers("ann")
        if "remaining" in name
    }


def by_requests():
    house = make_house()
    fill(house, 6)
    return house


def by_tokens():
    house = make_house(Limits(max_queued=100, max_queued_tokens=100))
    fill(house, 1, prompt_tokens=70)
    return house


def by_memory():
    return make_house(stats=EngineStats(running=1, kv_utilization=0.94))


def by_the_client_s_own():
    return make_house(Limits(max_queued=4, max_per_client=0))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("full", "status", "code"),
    [
        (by_requests, 503, "queue_full"),
        (by_tokens, 503, "queue_full"),
        (by_memory, 503, "memory_pressure"),
        (by_the_client_s_own, 429, "rate_limit_exceeded"),
    ],
)
async def test_a_full_house_refuses_before_any_work_is_done(full, status, code, path):
    house = full()
    inside = house.admission.in_house
    answer, body = await ask(house, path)
    assert (answer, body["error"]["code"]) == (status, code)
    assert house.tokenizer.calls == []
    assert house.admission.in_house == inside


async def test_who_finds_a_place_is_worked_for():
    house = make_house()
    for path in ROUTES:
        await ask(house, path)  # there is no engine to answer it
    assert house.tokenizer.calls == ["render", "encode", "encode", "compile"]


@pytest.mark.parametrize("path", ROUTES)
async def test_asking_a_full_replica_again_and_again_never_turns_into_a_429(path):
    house = make_house(requests=3, tokens=100)
    fill(house, 6)
    for _ in range(10):
        assert (await ask(house, path))[0] == 503
    assert remaining(house) == {"requests": 3, "tokens": 100}


async def test_a_prompt_that_proves_too_long_for_what_is_left_is_given_back_too():
    house = make_house(Limits(max_queued=4, max_queued_tokens=100), requests=3, tokens=100)
    fill(house, 1, prompt_tokens=49)  # room for the estimate of 50 tokens, and not for the 60 that it has
    status, body = await ask(house, "/v1/chat/completions")
    assert (status, body["error"]["code"]) == (503, "queue_full")
    assert house.tokenizer.calls == ["render", "encode"]
    assert remaining(house) == {"requests": 3, "tokens": 100}


async def test_a_request_that_is_wrong_is_charged_all_the_same():
    house = make_house(requests=3)
    house.tokenizer.encode = lambda text, **_: [1] * 5000
    assert (await ask(house, "/v1/chat/completions"))[0] == 400
    assert remaining(house) == {"requests": 2}
