"""The limits of a client at one of several gateways: reserved before a request, settled when it is over."""

import contextlib
import hashlib
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_gateway.client_limits import ClientLimiter
from quire_gateway.llm_client import Budget, Limits, LLMClient
from quire_gateway.llm_route import Prices
from quire_gateway.openai.calls import CHAT, COMPLETIONS, estimated_tokens, longest_answers, read
from quire_gateway.usage_ledger import UsageLedger, spending
from quire_http.errors import ApiError
from tests.gateway.conftest import Clock, slice_of
from tests.gateway.kube_stub import llm_object
from tests.server.launch import NO_TLS

KEY = {"authorization": "Bearer sk-alice"}
HASH = hashlib.sha256(b"sk-alice").hexdigest()
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Once"}],
    "max_tokens": 20,
    "temperature": 0,
}


def client(name="alice", **limits):
    return LLMClient("models", name, f"uid-{name}", "", (), limits=Limits(**limits))


def limiter_of(clock, num_gateways=lambda: 1):
    return ClientLimiter(num_gateways, UsageLedger(lambda place: None, clock), clock)


def reserve(limiter, who, num_tokens=0):
    return limiter.reserve(who, spending(0, num_tokens, Prices()), Prices())


def refused(limiter, who, num_tokens=0):
    with pytest.raises(ApiError) as error:
        reserve(limiter, who, num_tokens)
    assert error.value.status == 429
    return str(error.value)


def test_so_many_requests_at_once_and_each_that_ends_makes_room_for_one(clock):
    limiter, alice = limiter_of(clock), client(concurrent_requests=2)
    one, _ = reserve(limiter, alice, 0), reserve(limiter, alice, 0)
    assert "2 requests at once" in refused(limiter, alice)
    reserve(limiter, client("bob", concurrent_requests=1), 0)
    one.settle(0, 0)
    one.settle(0, 0)
    reserve(limiter, alice, 0)
    refused(limiter, alice)


def test_tokens_that_were_reserved_and_not_taken_are_there_for_the_next_request(clock):
    limiter, alice = limiter_of(clock), client(tokens_per_minute=1000)
    held = reserve(limiter, alice, 900)
    assert dict(held.headers())["x-ratelimit-remaining-tokens"] == "100"
    refused(limiter, alice, 200)
    held.settle(20, 30)
    reserve(limiter, alice, 900)


def test_a_request_that_was_not_served_costs_nothing(clock):
    limiter, alice = limiter_of(clock), client(requests_per_minute=1, tokens_per_minute=10)
    for _ in range(5):
        reserve(limiter, alice, 10).release()
    reserve(limiter, alice, 10)
    assert "1 requests a minute" in refused(limiter, alice)


def test_a_gateway_gives_out_its_share_by_how_many_run_now(clock):
    gateways = 1
    limiter = limiter_of(clock, lambda: gateways)
    alice = client(requests_per_minute=60, concurrent_requests=3)
    gateways = 2
    for _ in range(2):  # of three, rounded up
        reserve(limiter, alice, 0)
    refused(limiter, alice)
    gateways = 0  # none is known yet: this one runs
    reserve(limiter, alice, 0)
    refused(limiter, alice)


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400), st.floats(0, 5)), max_size=60))
def test_of_several_gateways_no_client_gets_more_than_its_tokens_and_what_each_last_request_took(requests):
    clock, served = Clock(), 0
    limiters = [limiter_of(clock, lambda: 3) for _ in range(3)]
    alice, begun = client(tokens_per_minute=600), clock.now
    for number, (reserved, taken, pause) in enumerate(requests):
        clock.now += pause
        try:
            held = reserve(limiters[number % 3], alice, reserved)
        except ApiError:
            continue
        held.settle(0, min(taken, reserved))
        served += min(taken, reserved)
    assert served <= 600 + (clock.now - begun) * 10 + 3 * 400


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 256),
        ({"max_tokens": 10}, 10),
        ({"n": 3, "max_completion_tokens": 10}, 30),
        ({"max_tokens": -5}, 0),
        ({"prompt": ["a", "b"], "n": 2, "max_tokens": 10}, 40),
        ({"prompt": [[1, 2], [3]], "max_tokens": 10}, 20),
        ({"prompt": [1, 2, 3], "max_tokens": 10}, 10),
    ],
)
def test_a_request_reserves_the_longest_answers_it_may_have(fields, tokens):
    prompt = b'{"model": "m", "messages": [{"role": "user", "content": "%b"}]' % (b"x" * 396)
    text = b"".join(
        b', "%b": %b' % (name.encode(), json.dumps(value).encode()) for name, value in fields.items()
    )
    assert longest_answers(read(CHAT, prompt + text + b"}")) == tokens


def test_no_answer_is_reserved_longer_than_the_context_of_what_answers():
    call = read(CHAT, b'{"model": "m", "messages": [], "max_tokens": 1000000, "n": 2}')
    assert [longest_answers(call, length) for length in (None, 2048, 10**7)] == [2 * 10**6, 4096, 2 * 10**6]
    assert longest_answers(read(CHAT, b'{"model": "m", "messages": [], "max_tokens": 9}'), 2048) == 9


def test_a_length_that_no_number_holds_is_a_429_and_not_an_error(clock):
    body = b'{"model": "m", "max_tokens": 1' + b"0" * 15 + b', "n": 1' + b"0" * 15 + b"}"
    limiter, alice = limiter_of(clock), client(tokens_per_minute=10)
    reserve(limiter, alice, longest_answers(read(CHAT, body)))
    refused(limiter, alice, 1)


@pytest.mark.parametrize(
    ("prompt", "tokens"), [([7] * 50, 50), ([[7] * 20, [100_000] * 30], 50), ("x" * 40, 10)]
)
def test_a_prompt_of_token_ids_is_reserved_exactly(prompt, tokens):
    assert (
        estimated_tokens(read(COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())) == tokens
    )


LIMITS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("tokens_per_minute", "requests_per_minute"), st.integers(1, 10**6))
)


@given(st.lists(LIMITS, min_size=2, max_size=6), st.integers(0, 2000), st.booleans())
def test_what_ends_after_any_change_of_limits_gives_back_no_more_than_it_was_charged(edits, taken, released):
    clock = Clock()
    limiter = limiter_of(clock)
    held = reserve(limiter, client(**edits[0]), 1000)

    def left():
        return dict(limiter.rates.headers("uid-alice"))

    for limits in edits[1:]:
        with contextlib.suppress(ApiError):
            reserve(limiter, client(**limits), 1000).settle_whole()
    before = left()
    held.release() if released else held.settle(0, taken)
    with limiter.known(client(**edits[-1])):
        after = left()
    for kind in ("tokens", "requests"):
        limit, was = edits[-1].get(f"{kind}_per_minute"), edits[0].get(f"{kind}_per_minute")
        name = f"x-ratelimit-remaining-{kind}"
        assert (limit is None) is (name not in after)
        if limit is not None:
            amount = 1000 if kind == "tokens" else 1
            charged = 0 if was is None else amount * limit / was
            assert int(after[name]) <= int(before[name]) + charged + 1


STEPS = st.tuples(
    st.sampled_from(["new", "settle", "whole", "release"]), st.integers(0, 9), st.integers(0, 99)
)


@given(st.lists(STEPS, max_size=40), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_however_requests_end_and_limits_and_gateways_change_nothing_stays_reserved(steps, gateways):
    clock = Clock()
    limiter = limiter_of(clock, lambda: gateways[int(clock.now) % len(gateways)])
    running = []
    for step, index, tokens in steps:
        clock.now += 1
        limits = {"concurrent_requests": 3, "tokens_per_minute": 100 + index, "requests_per_minute": 9}
        if step == "new":
            with contextlib.suppress(ApiError):
                running.append(reserve(limiter, client("ab"[index % 2], **limits), tokens))
        elif running:
            held = running[index % len(running)]  # or one that has ended already
            ends = {
                "settle": lambda held=held, tokens=tokens: held.settle(tokens, 0),
                "whole": held.settle_whole,
            }
            ends.get(step, held.release)()
    for held in running:
        held.release()
    assert limiter.running == limiter.clients == {}
    clock.now += 1e6
    for name in "ab":
        budget = LLMClient("models", name, f"uid-{name}", "", (), budget=Budget(tokens=10**6))
        left = 10**6 - limiter.ledger.spent(budget).tokens
        limiter.reserve(budget, spending(left, 0, Prices()), Prices()).release()


def test_of_clients_that_are_refused_nothing_is_kept_but_their_rates(clock):
    limiter = limiter_of(clock)
    for number in range(10):
        who = client(f"one-{number}", tokens_per_minute=10)
        reserve(limiter, who, 10).settle_whole()
        refused(limiter, who, 10)
    assert limiter.running == limiter.clients == {}


@pytest.fixture
def limited(start, engines, kube):
    def limited(**limits):
        kube.put(llm_object("LLMClient", "alice", {"keyHashes": [HASH], "limits": limits}))
        return start(slice_of("one", engines[0]))

    return limited


def ask(gateway, **fields):
    return httpx.post(gateway.url + CHAT, json={**BODY, **fields}, headers=KEY, timeout=60, verify=NO_TLS)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_charged_with_what_it_took_and_the_client_sees_what_is_left(limited, stream):
    gateway = limited(tokensPerMinute=10_000)
    first, second = ask(gateway, stream=stream, max_tokens=1000), ask(gateway, stream=stream)
    assert first.status_code == second.status_code == 200
    assert ": usage" not in first.text
    (line, _) = gateway.wait_requests(2)
    taken = line["prompt_tokens"] + line["completion_tokens"]
    assert line["completion_tokens"] > 0
    reserved = 20 + 2  # of the second, which has begun
    left = int(second.headers["x-ratelimit-remaining-tokens"])
    assert 0 <= left - (10_000 - taken - reserved) <= 10_000 // 60 * 30, "and what was refilled since"
    assert first.headers["x-ratelimit-limit-tokens"] == "10000"
    labels = {"model": "tiny", "client": "models/alice"}
    assert gateway.metric("gateway_tokens_total", **labels, type="prompt") >= 2 * line["prompt_tokens"]


def test_a_client_over_its_limit_is_told_when_to_ask_again(limited):
    gateway = limited(requestsPerMinute=2)
    assert [ask(gateway).status_code for _ in range(2)] == [200, 200]
    answer = ask(gateway)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert gateway.wait_requests(3)[-1]["outcome"] == "limited"
    gateway.kube.put(llm_object("LLMClient", "alice", {"keyHashes": [HASH]}))
    gateway.wait("the limit is gone", lambda: ask(gateway).status_code == 200)
