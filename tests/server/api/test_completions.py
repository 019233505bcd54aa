"""Admission comes first: a refused request is not rendered or tokenized, and its client is not charged."""

import asyncio
import json
import threading
import time
from dataclasses import replace
from typing import ClassVar

import pytest

from quire_http.drain import Drain, DrainLimits
from quire_http.exchange import HttpExchange
from quire_http.rate_limit import RateLimits, Rates
from quire_server.api import completions
from quire_server.api.admission import Admission, AdmissionRequest, Limits
from quire_server.api.auth import PRINCIPAL, Principal
from quire_server.api.context import ServerContext
from quire_server.api.output_processor import OutputDelta
from quire_server.engine.messages import EngineInfo, EngineStats
from quire_server.metrics.requests import Metrics
from quire_server.model_dir.generation_config import SamplingDefaults

INFO = EngineInfo(max_model_len=1000, vocab_size=9, num_blocks=100, block_size=10, max_num_seqs=2)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "word " * 40}]}
COMPLETION = {"model": "m", "prompt": "word " * 40, "structured_outputs": {"choice": ["a", "b"]}}
ROUTES = {
    "/v1/chat/completions": (completions.chat, CHAT),
    "/v1/completions": (completions.complete, COMPLETION),
}
LONG_TEXT = "word " * 20_000
BEYOND_CONTEXT = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG_TEXT}]},
    "/v1/completions": {"prompt": LONG_TEXT},
}


class Engine:
    info = INFO
    stats = EngineStats()
    adapters: ClassVar = {}


class CallRecorder:
    """Replaces the tokenizer, the template and the grammar compiler; records the calls."""

    vocab_size = 9
    eos_token_ids = (8,)
    has_thinking_switch = False

    def __init__(self):
        self.calls = []

    def encode(self, text, **_):
        self.calls.append("encode")
        return [1] * 60

    def least_tokens(self, text):
        return 0

    def decode(self, tokens, **_):
        self.calls.append("decode")

    def render(self, messages, **_):
        self.calls.append("render")
        return "text"

    def known(self, form, scope):
        self.calls.append("compile")


def make_context(limits=None, stats=None, **rates):
    recorder, engine = CallRecorder(), Engine()
    engine.stats = stats or EngineStats()
    metrics = Metrics("m")
    return ServerContext(
        served_names=("m",),
        engine=engine,
        tokenizer=recorder,
        template=recorder,
        grammars=recorder,
        defaults=SamplingDefaults(),
        metrics=metrics,
        admission=Admission(limits or Limits(max_queued=4), time.monotonic, metrics.admitted),
        drain=Drain(DrainLimits(1, 0), time.monotonic),
        keys=None,
        state=None,
        thresholds=None,
        deep_check=None,
        rates=Rates(lambda _: RateLimits(**rates), lambda: 0.0),
    )


def fill(context, num_answers, prompt_tokens=0):
    asked = AdmissionRequest("another", num_answers, prompt_tokens, priority=-1)
    stats = context.engine.stats
    context.admission.reserve(asked.client, INFO, stats).claim(asked, INFO, stats)


async def post(context, path, changes=None):
    """(status, body) of the response; calls the route's handler without HTTP."""
    handle, body = ROUTES[path]
    body = {**body, **(changes or {})}
    sent = []

    incoming = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})

    async def send(message):
        sent.append(message)

    scope = {"path": path, "headers": [], PRINCIPAL: Principal("ann")}
    await handle(context, HttpExchange(scope, incoming.get, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def remaining_limits(context):
    return {
        name.removeprefix("x-ratelimit-remaining-"): int(value)
        for name, value in context.rates.headers("ann")
        if "remaining" in name
    }


def full_by_requests():
    context = make_context()
    fill(context, 6)
    return context


def full_by_tokens():
    context = make_context(Limits(max_queued=100, max_queued_tokens=100))
    fill(context, 1, prompt_tokens=70)
    return context


def full_by_memory():
    return make_context(stats=EngineStats(running=1, kv_utilization=0.94))


def full_by_client_limit():
    return make_context(Limits(max_queued=4, max_per_client=0))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("make_full", "status", "code"),
    [
        (full_by_requests, 503, "queue_full"),
        (full_by_tokens, 503, "queue_full"),
        (full_by_memory, 503, "memory_pressure"),
        (full_by_client_limit, 429, "rate_limit_exceeded"),
    ],
)
async def test_a_full_server_refuses_before_the_request_is_tokenized(make_full, status, code, path):
    context = make_full()
    num_admitted = context.admission.num_admitted
    answer, body = await post(context, path)
    assert (answer, body["error"]["code"]) == (status, code)
    assert context.tokenizer.calls == []
    assert context.admission.num_admitted == num_admitted


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("make_full", [full_by_tokens, full_by_memory])
async def test_a_prompt_beyond_the_context_is_a_400_whatever_the_load(make_full, path):
    """Its text may have any number of tokens, which is found out off the event loop."""
    context, threads = make_full(), []
    context.engine.info = replace(INFO, num_blocks=10_000)
    context.tokenizer.render = lambda messages, **_: LONG_TEXT

    def encode(text, **_):
        threads.append(threading.current_thread())
        return [1] * (len(text) // 4)

    context.tokenizer.encode = encode
    before = context.admission.num_admitted, context.admission.queued_tokens
    status, body = await post(context, path, BEYOND_CONTEXT[path])
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
    assert (context.admission.num_admitted, context.admission.queued_tokens) == before


async def test_a_text_that_its_length_says_is_too_long_is_a_400_without_room_for_its_answers():
    context, path = make_context(requests=3), "/v1/completions"
    fill(context, 5)  # of 6
    assert (await post(context, path, {"n": 2}))[0] == 503
    context.tokenizer.least_tokens = lambda text: len(text) // 100 + 1
    status, body = await post(context, path, {**BEYOND_CONTEXT[path], "n": 2})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert context.tokenizer.calls == []
    assert remaining_limits(context) == {"requests": 2}, "as any invalid request"


async def test_an_admitted_request_is_rendered_tokenized_and_its_grammar_compiled():
    context = make_context()
    for path in ROUTES:
        await post(context, path)  # without an engine, so it fails afterwards
    assert context.tokenizer.calls == ["render", "encode", "encode", "compile"]


@pytest.mark.parametrize("path", ROUTES)
async def test_refusals_by_a_full_server_do_not_use_up_the_rate_limit(path):
    context = make_context(requests=3, tokens=100)
    fill(context, 6)
    for _ in range(10):
        assert (await post(context, path))[0] == 503
    assert remaining_limits(context) == {"requests": 3, "tokens": 100}


async def test_a_prompt_refused_after_tokenization_is_not_charged():
    context = make_context(Limits(max_queued=4, max_queued_tokens=100), requests=3, tokens=100)
    fill(context, 1, prompt_tokens=49)  # room for the estimate of 50 tokens, and not for the 60 that it has
    status, body = await post(context, "/v1/chat/completions")
    assert (status, body["error"]["code"]) == (503, "queue_full")
    assert context.tokenizer.calls == ["render", "encode"]
    assert remaining_limits(context) == {"requests": 3, "tokens": 100}


async def test_an_invalid_request_is_charged():
    context = make_context(requests=3)
    context.tokenizer.encode = lambda text, **_: [1] * 5000
    assert (await post(context, "/v1/chat/completions"))[0] == 400
    assert remaining_limits(context) == {"requests": 2}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_counted_and_its_place_free_when_its_client_may_send_the_next_one(
    path, stream, monkeypatch
):
    """Whatever the event loop does after the last byte was sent finds it so."""
    context, found = make_context(Limits(max_queued=4, max_per_client=1)), []
    handle, body = ROUTES[path]
    body = {key: value for key, value in body.items() if key != "structured_outputs"} | {"stream": stream}
    incoming = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})

    async def one_answer(_request, _requests, emit):
        await emit(OutputDelta(0, "text", (), 1, 0, "length"))

    def next_turn():
        text = context.metrics.exposition("text/plain")[0].decode()
        found.append((context.admission.num_admitted, context.drain.num_requests, text))

    async def send(message):
        if message["type"] == "http.response.body" and not message["more_body"]:
            asyncio.get_running_loop().call_soon(next_turn)

    monkeypatch.setattr(completions, "answer_all", one_answer)
    scope = {"path": path, "headers": [], PRINCIPAL: Principal("ann")}
    await handle(context, HttpExchange(scope, incoming.get, send))
    await asyncio.sleep(0)
    assert len(found) == 1
    num_admitted, num_requests, text = found[0]
    assert (num_admitted, num_requests) == (0, 0)
    assert 'status="success"} 1.0' in text
