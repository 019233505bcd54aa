"""EngineClient, through which the API process uses the engine."""

import asyncio
import contextlib
import math
import time
from dataclasses import replace

import pytest

from quire_server.core.request import Request
from quire_server.core.sampling_params import Grammar, GrammarKind, SamplingParams
from quire_server.core.step import TokenEvent, failure_event
from quire_server.engine.client import (
    DeadlineExceededError,
    EngineClient,
    EngineGoneError,
    OutputStream,
    RequestLostError,
)
from quire_server.engine.messages import MAX_FRAME_BYTES, AdapterState, AdapterStates, FrameReader, to_frame
from quire_server.engine.socket_server import SOCKET_NAME
from tests.server.engine.conftest import INFO


def make_request(name, prompt=(5,), max_tokens=3):
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0), arrival=0.0)


@contextlib.asynccontextmanager
async def connected(engine):
    client = EngineClient(engine.run_dir / SOCKET_NAME, lambda outputs: None)
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


async def test_many_requests_at_once_each_get_their_own_tokens(engine):
    async with connected(engine) as client:
        answers = await asyncio.gather(
            *(tokens_of(client, make_request(f"r{i}", (i,), 5)) for i in range(40))
        )
    assert answers == [list(range(i + 1, i + 6)) for i in range(40)]


async def test_output_between_two_reads_is_merged(engine):
    async with connected(engine) as client, client.submit(make_request("a", max_tokens=30)) as answer:
        first = await answer.next()
        await asyncio.to_thread(engine.wait, lambda engine: not engine.scheduler.has_work)
        await asyncio.sleep(0.05)
        rest = await answer.next()
    assert list(first.token_ids + rest.token_ids) == list(range(6, 36))
    assert rest.finish_reason == "length"


async def test_tokens_received_before_a_failure_are_returned_first():
    stream = OutputStream("a", lambda num_tokens, at: None, is_whole=False)
    stream.put(TokenEvent("a", (5,)))
    stream.put_token(6, 0.0)
    stream.put(failure_event("a", "no memory"))
    assert (await stream.next()).token_ids == (5, 6)
    with pytest.raises(RequestLostError, match="no memory"):
        await stream.next()


async def test_tokens_of_a_whole_answer_are_reported_as_they_come_and_returned_at_its_end(engine):
    engine.runner.delay = 0.005
    reported, events = [], []
    async with connected(engine) as client:
        request = make_request("a", max_tokens=30)
        async with client.submit(
            request, math.inf, lambda *one: reported.append(one), is_whole=True
        ) as answer:
            while not events or events[-1].finish_reason is None:
                events.append(await answer.next())
    assert [token for event in events for token in event.token_ids] == list(range(6, 36))
    assert len(events) <= 2, "the first token, and all others"
    assert [num_tokens for num_tokens, _ in reported] == [1] * 30
    assert reported[-1][1] - reported[0][1] > 29 * engine.runner.delay / 2, "they were reported together"


async def test_requests_are_reported_as_received_once_the_stats_count_them(engine):
    """Between two words of the engine a burst is in no stats: who admits more has to know."""
    engine.runner.delay = 0.05
    seen = {}
    async with connected(engine) as client, contextlib.AsyncExitStack() as streams:

        def received(name):
            seen[name] = client.stats.running + client.stats.waiting

        for name in ("a", "b", "c"):
            asked = make_request(name, (1, 2), max_tokens=40)
            submitted = client.submit(asked, on_received=lambda name=name: received(name))
            await streams.enter_async_context(submitted)
        assert not seen
        while len(seen) < 3:
            await asyncio.sleep(0.005)
        assert seen == {"a": 3, "b": 3, "c": 3}
        assert client.stats.growth_blocks + client.stats.waiting_blocks > 0


async def test_closing_the_stream_early_aborts_the_request(engine):
    engine.runner.delay = 0.01
    async with connected(engine) as client:
        async with client.submit(make_request("a", max_tokens=60)) as answer:
            await answer.next()
        await asyncio.to_thread(engine.wait, lambda engine: not engine.scheduler.has_work)


async def test_the_length_of_an_answer_that_ends_at_a_stop_string_is_sent_to_the_engine(engine):
    engine.runner.delay = 0.002
    lengths = engine.scheduler._queue._output_lengths
    before = lengths.expect(1, 60)
    async with connected(engine) as client:
        for is_complete in (False, True):
            async with client.submit(make_request("a", max_tokens=60)) as answer:
                seen = 0
                while seen < 20:
                    seen += len((await answer.next()).token_ids)
                answer.is_complete = is_complete
            await asyncio.to_thread(engine.wait, lambda engine: not engine.scheduler.has_work)
            assert (lengths.expect(1, 60) != before) == is_complete
    assert 20 <= lengths.expect(1, 60) < 60


async def test_a_deadline_ends_an_answer_even_if_the_engine_is_stuck(engine):
    engine.runner.delay = 3.0
    async with connected(engine) as client:
        begin = time.monotonic()
        async with client.submit(make_request("a", max_tokens=60), begin + 0.05) as answer:
            with pytest.raises(DeadlineExceededError):
                while True:
                    await answer.next()
        assert time.monotonic() - begin < engine.runner.delay, "it waited for the engine"
        await asyncio.to_thread(engine.wait, lambda engine: not engine.scheduler.has_work)


async def test_a_refused_request_fails_with_the_reason(engine):
    async with connected(engine) as client:
        with pytest.raises(RequestLostError, match="vocabulary"):
            await tokens_of(client, make_request("a", (1000,)))


async def test_requests_that_exceed_a_frame_together_do_not_break_the_connection(engine):
    """For example, one HTTP request with a long prompt and n > 1."""
    engine.runner.delay = 0.01
    async with connected(engine) as client:
        other = asyncio.create_task(tokens_of(client, make_request("other", max_tokens=60)))
        await asyncio.to_thread(engine.wait, lambda engine: engine.scheduler.has_work)
        prompt = (2**31,) * (MAX_FRAME_BYTES // 4 // 5 + 1)  # each id takes five bytes
        long_requests = [tokens_of(client, make_request(f"r{i}", prompt)) for i in range(4)]
        outcomes = await asyncio.gather(*long_requests, return_exceptions=True)
        assert [type(one) for one in outcomes] == [RequestLostError] * 4
        assert len(await other) == 60


async def test_many_large_grammars_do_not_break_the_connection(engine):
    engine.runner.grammars.may_build.set()
    grammar = Grammar(GrammarKind.JSON, "x" * (256 << 10))
    async with connected(engine) as client:
        requests = [make_request(f"r{i}") for i in range(MAX_FRAME_BYTES // len(grammar.text) + 4)]
        each = [replace(one, sampling=replace(one.sampling, grammar=grammar)) for one in requests]
        answers = await asyncio.gather(*(tokens_of(client, one) for one in each))
    assert all(len(tokens) == len(answers[0]) > 0 for tokens in answers)


async def test_every_open_request_ends_when_the_engine_ends(engine):
    engine.runner.delay = 0.05
    async with connected(engine) as client:
        open_requests = [
            asyncio.create_task(tokens_of(client, make_request(f"r{i}", max_tokens=60))) for i in range(3)
        ]
        await asyncio.to_thread(engine.wait, lambda engine: engine.scheduler.num_running == 3)
        await asyncio.to_thread(engine.stop)
        outcomes = await asyncio.gather(*open_requests, return_exceptions=True)
        assert [type(one) for one in outcomes] == [EngineGoneError] * 3
        with pytest.raises(EngineGoneError):
            await tokens_of(client, make_request("late"))


async def test_without_an_engine_a_request_fails_with_engine_gone(tmp_path):
    client = EngineClient(tmp_path / SOCKET_NAME, lambda outputs: None)
    with pytest.raises(EngineGoneError, match="loading"):
        await tokens_of(client, make_request("a"))


class ScriptedEngine:
    """Takes loads and drops; a test says which states it announces, as if there were other peers, too."""

    def __init__(self, run_dir):
        self.run_dir, self.inputs, self.writer = run_dir, asyncio.Queue(), None

    async def serve(self, reader, writer):
        self.writer, frames = writer, FrameReader()
        writer.write(to_frame(INFO))
        while data := await reader.read(1 << 16):
            for message in frames.feed(data):
                self.inputs.put_nowait(message)
        writer.close()

    async def load_id(self):
        (load,) = (await self.inputs.get()).adapter_loads
        return load.load_id

    def announce(self, *loads, is_loading=False):
        states = [AdapterState("a", not is_loading, is_loading, load, "", "", 0, 0) for load in loads]
        self.writer.write(to_frame(AdapterStates(tuple(states))))


@contextlib.asynccontextmanager
async def scripted(run_dir):
    engine = ScriptedEngine(run_dir)
    server = await asyncio.start_unix_server(engine.serve, str(run_dir / SOCKET_NAME))
    async with server, asyncio.timeout(60), connected(engine) as client:
        yield engine, client


@pytest.mark.parametrize("then", [(), ("other",)], ids=["dropped", "loaded anew"])
async def test_a_load_that_another_peer_undoes_ends_with_the_reason(tmp_path, then):
    async with scripted(tmp_path) as (engine, client):
        loading = asyncio.create_task(client.load_adapter("a", tmp_path))
        engine.announce("earlier")
        engine.announce(await engine.load_id(), is_loading=True)
        engine.announce(*then, is_loading=True)
        state = await loading
        assert not state.is_ready and "while it was read" in state.reason


async def test_loads_and_drops_of_one_name_take_turns_and_all_end(tmp_path):
    async with scripted(tmp_path) as (engine, client):
        calls = [client.load_adapter("a", tmp_path), client.load_adapter("a", tmp_path)]
        tasks = [asyncio.create_task(one) for one in (*calls, client.drop_adapter("a"))]
        first = await engine.load_id()
        assert engine.inputs.empty(), "the next one has not waited"
        engine.announce(first, is_loading=True)
        engine.announce(first)
        assert (await tasks[0]).load_id == first and (await tasks[0]).is_ready
        second = await engine.load_id()
        engine.announce(second)
        assert (await tasks[1]).load_id == second != first
        assert (await engine.inputs.get()).adapter_drops == ("a",)
        engine.announce("loaded by another peer")
        await tasks[2]
        assert engine.inputs.empty()


async def test_an_engine_that_ends_while_it_loads_an_adapter_is_gone(tmp_path):
    async with scripted(tmp_path) as (engine, client):
        loading = asyncio.create_task(client.load_adapter("a", tmp_path))
        await engine.load_id()
        engine.writer.close()
        with pytest.raises(EngineGoneError, match="loaded the adapter"):
            await loading
