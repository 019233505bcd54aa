"""The API process's view of the engine."""

import asyncio
import contextlib
import math
import time
from dataclasses import replace

import pytest

from quire_server.core.request import Grammar, GrammarKind, Request, SamplingParams
from quire_server.core.step import TokenEvent, failure
from quire_server.engine.client import (
    Answer,
    DeadlineExceededError,
    EngineClient,
    EngineGoneError,
    RequestLostError,
)
from quire_server.engine.inbox import SOCKET_NAME
from quire_server.engine.messages import MAX_FRAME_BYTES


def ask(name, prompt=(5,), max_tokens=3):
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0), arrival=0.0)


@contextlib.asynccontextmanager
async def connected(rig):
    client = EngineClient(rig.run_dir / SOCKET_NAME, lambda outbox: None)
    running = asyncio.create_task(client.run())
    while not client.connected:
        await asyncio.sleep(0.005)
    try:
        yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def tokens_of(client, request):
    tokens = []
    async with client.submit(request) as answer:
        while True:
            event = await answer.next()
            tokens += event.token_ids
            if event.finish_reason is not None:
                return tokens


async def test_many_requests_at_once_each_get_their_own_tokens(rig):
    async with connected(rig) as client:
        answers = await asyncio.gather(*(tokens_of(client, ask(f"r{i}", (i,), 5)) for i in range(40)))
    assert answers == [list(range(i + 1, i + 6)) for i in range(40)]


async def test_what_came_while_nobody_looked_comes_together(rig):
    async with connected(rig) as client, client.submit(ask("a", max_tokens=30)) as answer:
        first = await answer.next()
        await asyncio.to_thread(rig.wait, lambda r: not r.scheduler.has_work)
        await asyncio.sleep(0.05)
        rest = await answer.next()
    assert list(first.token_ids + rest.token_ids) == list(range(6, 36))
    assert rest.finish_reason == "length"


async def test_tokens_that_came_with_a_failure_are_given_before_it():
    answer = Answer("a", lambda num_tokens, at: None, is_whole=False)
    answer.put(TokenEvent("a", (5,)))
    answer.put_token(6, 0.0)
    answer.put(failure("a", "no memory"))
    assert (await answer.next()).token_ids == (5, 6)
    with pytest.raises(RequestLostError, match="no memory"):
        await answer.next()


async def test_tokens_of_a_whole_answer_are_told_as_they_come_and_given_at_its_end(rig):
    rig.runner.delay = 0.005
    told, events = [], []
    async with connected(rig) as client:
        request = ask("a", max_tokens=30)
        async with client.submit(request, math.inf, lambda *one: told.append(one), is_whole=True) as answer:
            while not events or events[-1].finish_reason is None:
                events.append(await answer.next())
    assert [token for event in events for token in event.token_ids] == list(range(6, 36))
    assert len(events) <= 2, "the first token, and all others"
    assert [num_tokens for num_tokens, _ in told] == [1] * 30
    assert told[-1][1] - told[0][1] > 29 * rig.runner.delay / 2, "they were told together"


async def test_leaving_early_aborts_the_request(rig):
    rig.runner.delay = 0.01
    async with connected(rig) as client:
        async with client.submit(ask("a", max_tokens=60)) as answer:
            await answer.next()
        await asyncio.to_thread(rig.wait, lambda r: not r.scheduler.has_work)


async def test_the_engine_learns_the_length_of_an_answer_whose_end_only_the_reader_saw(rig):
    rig.runner.delay = 0.002
    lengths = rig.scheduler._arrivals._lengths
    before = lengths.expect(1, 60)
    async with connected(rig) as client:
        for is_complete in (False, True):
            async with client.submit(ask("a", max_tokens=60)) as answer:
                seen = 0
                while seen < 20:
                    seen += len((await answer.next()).token_ids)
                answer.is_complete = is_complete
            await asyncio.to_thread(rig.wait, lambda r: not r.scheduler.has_work)
            assert (lengths.expect(1, 60) != before) == is_complete
    assert 20 <= lengths.expect(1, 60) < 60


async def test_at_its_deadline_an_answer_ends_even_while_the_engine_is_stuck(rig):
    rig.runner.delay = 1.0
    async with connected(rig) as client:
        begin = time.monotonic()
        async with client.submit(ask("a", max_tokens=60), begin + 0.05) as answer:
            with pytest.raises(DeadlineExceededError):
                while True:
                    await answer.next()
        assert time.monotonic() - begin < 1.0, "it waited for the engine"
        await asyncio.to_thread(rig.wait, lambda r: not r.scheduler.has_work)


async def test_a_request_that_the_engine_refuses_is_lost_with_its_reason(rig):
    async with connected(rig) as client:
        with pytest.raises(RequestLostError, match="vocabulary"):
            await tokens_of(client, ask("a", (1000,)))


async def test_requests_that_fill_more_than_a_frame_together_cost_nobody_the_connection(rig):
    """As one request with n long answers makes them."""
    rig.runner.delay = 0.01
    async with connected(rig) as client:
        other = asyncio.create_task(tokens_of(client, ask("other", max_tokens=60)))
        await asyncio.to_thread(rig.wait, lambda r: r.scheduler.has_work)
        prompt = (2**31,) * (MAX_FRAME_BYTES // 4 // 5 + 1)  # each id takes five bytes
        long_ones = [tokens_of(client, ask(f"r{i}", prompt)) for i in range(4)]
        outcomes = await asyncio.gather(*long_ones, return_exceptions=True)
        assert [type(one) for one in outcomes] == [RequestLostError] * 4
        assert len(await other) == 60


async def test_large_grammars_that_come_at_once_cost_nobody_the_connection(rig):
    rig.runner.grammars.may_build.set()
    grammar = Grammar(GrammarKind.JSON, "x" * (256 << 10))
    async with connected(rig) as client:
        requests = [ask(f"r{i}") for i in range(MAX_FRAME_BYTES // len(grammar.text) + 4)]
        each = [replace(one, sampling=replace(one.sampling, grammar=grammar)) for one in requests]
        answers = await asyncio.gather(*(tokens_of(client, one) for one in each))
    assert all(len(tokens) == len(answers[0]) > 0 for tokens in answers)


async def test_every_open_request_ends_when_the_engine_ends(rig):
    rig.runner.delay = 0.05
    async with connected(rig) as client:
        open_ones = [asyncio.create_task(tokens_of(client, ask(f"r{i}", max_tokens=60))) for i in range(3)]
        await asyncio.to_thread(rig.wait, lambda r: r.scheduler.num_running == 3)
        await asyncio.to_thread(rig.stop)
        outcomes = await asyncio.gather(*open_ones, return_exceptions=True)
        assert [type(one) for one in outcomes] == [EngineGoneError] * 3
        with pytest.raises(EngineGoneError):
            await tokens_of(client, ask("late"))


async def test_without_an_engine_a_request_says_so(tmp_path):
    client = EngineClient(tmp_path / SOCKET_NAME, lambda outbox: None)
    with pytest.raises(EngineGoneError, match="loading"):
        await tokens_of(client, ask("a"))
