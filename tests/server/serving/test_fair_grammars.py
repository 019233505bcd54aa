"""One key floods the compiler of grammars with the slowest schemas there are; another key's is next."""

import asyncio
import time

import httpx
import pytest

from tests.server.launch import Server

SLOW = {"type": "integer", "multipleOf": 7919 * 7927}  # an automaton of 60 million states
NUM_SLOW = 31
LIMIT_SECONDS = 2.0  # of one compilation


@pytest.fixture
def server(tiny, tmp_path):
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("alice", "bob"):
        (keys / name).write_text(f"{name}-s-key")
    with Server(tiny, tmp_path, "--api-keys-dir", str(keys)) as server:
        yield server.wait_ready()


def asked(kind, form):
    return {"model": "tiny", "prompt": "x", "max_tokens": 4, "structured_outputs": {kind: form}}


async def timed(http, key, body):
    begun = time.monotonic()
    answer = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}-s-key"})
    return answer, time.monotonic() - begun


@pytest.mark.deep
async def test_slow_schemas_of_one_key_delay_another_by_one_of_them_and_a_repetition_costs_nothing(server):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
        alone = (await timed(http, "alice", asked("json", SLOW)))[1]
        assert alone > LIMIT_SECONDS, "it is slow, or nothing is proved"
        again, seconds = await timed(http, "alice", asked("json", SLOW))
        assert again.status_code == 400 and "too long" in again.json()["error"]["message"]
        assert seconds < alone / 4
        # Which tells no other key that it was sent.
        assert (await timed(http, "bob", asked("json", SLOW)))[1] > LIMIT_SECONDS

        flood = [
            asyncio.create_task(timed(http, "alice", asked("json", SLOW | {"title": str(number)})))
            for number in range(NUM_SLOW)
        ]
        server_side = "llm_active_requests"
        while await asyncio.to_thread(server.metric, server_side) < NUM_SLOW:
            await asyncio.sleep(0.02)
        before = sum(one.done() for one in flood)
        answer, _ = await timed(http, "bob", asked("regex", "[a-c]{4}"))
        assert answer.status_code == 200, answer.text
        # One that was being compiled, and one that ended while the request was on its way.
        assert sum(one.done() for one in flood) <= before + 2, "the flood went on"
        for one in flood:
            one.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        # What its client gave up is not compiled either.
        answer, seconds = await timed(http, "alice", asked("regex", "[d-f]{4}"))
        assert answer.status_code == 200 and seconds < NUM_SLOW / 2 * LIMIT_SECONDS
