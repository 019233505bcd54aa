"""No answer holds anything of another client's prompt, however requests share the server.

Sixty-four clients, each with a secret, ask a model that repeats its prompt, through a KV cache of forty
blocks: prefixes are shared, requests are preempted, swapped out and aborted, drafts are verified and grammars
compiled. CROSS_TALK_MINUTES is how long; `make soak` gives it half an hour, in which 20,000 requests have to
be answered. A machine that is too slow for that gets twice the time.
"""

import asyncio
import json
import logging
import os
import random
import re
import time
from collections import Counter

import httpx
import pytest

from tests.server import adapter_files, copying_model
from tests.server.copying_model import PERIOD
from tests.server.launch import NO_TLS, Server

MINUTES = float(os.environ.get("CROSS_TALK_MINUTES", "0.3"))
ENOUGH_ANSWERS = round(20_000 * MINUTES / 30)
pytestmark = pytest.mark.timeout(120 + 2 * 60 * MINUTES)

CLIENTS, GROUPS = 64, 8
FLAGS = (
    *("--num-gpu-blocks-override", "40", "--block-size", "16", "--max-num-seqs", "16"),
    *("--preemption-mode", "swap", "--kv-offload-host-bytes", str(4 << 20)),
    *("--speculative-method", "ngram", "--scheduling-policy", "priority", "--max-adapters", "2"),
)
ADAPTERS = ("x", "y", "z")  # more than places; they change nothing, so that the model goes on repeating
SECRET = re.compile(r"c\d\d-[0-9a-f]{20}")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cross-talk")
    keys = directory / "keys"
    keys.mkdir()
    for number in range(CLIENTS):
        (keys / f"client-{number}").write_text(
            f"key-{number}\ngroup: team-{number % GROUPS}\nhighest-priority: high\n"
        )
    model = copying_model.write(directory / "model")
    for name in ADAPTERS:
        adapter_files.write(directory / "adapters" / name, model, scale=0.0)
    flags = ("--api-keys-dir", str(keys), "--adapters-dir", str(directory / "adapters"), *FLAGS)
    with Server(model, directory, *flags) as server:
        server.wait_ready()
        server.wait("adapters", lambda: len(server.statusz()["adapters"]) == len(ADAPTERS))
        server.wait("them", lambda: all(one["state"] == "Ready" for one in server.statusz()["adapters"]))
        yield server


class Client:
    """One of the clients. `outcomes` counts what became of its requests, those of all clients together."""

    def __init__(self, number, http, outcomes):
        self._dice, self._http, self._outcomes = random.Random(number), http, outcomes
        self.secret = f"c{number:02}-{self._dice.randbytes(10).hex()}"
        self._headers = {"authorization": f"Bearer key-{number}"}
        self._prefix = f"What team {number % GROUPS} tells the model before each question. " * 2
        assert len(self.secret) == PERIOD and SECRET.fullmatch(self.secret)

    async def ask_until(self, is_over):
        while not is_over():
            kind = self._dice.choice(
                (self._whole, self._whole, self._in_a_grammar, self._twice, self._streamed, self._aborted)
            )
            prefix = self._prefix[: self._dice.choice((0, 0, 32, 64, 96))]
            begun = self._dice.randrange(PERIOD)  # where in its second repetition the prompt ends
            prompt = prefix + self.secret + self.secret[:begun]
            length = self._dice.randint(1, 100)
            await kind(
                {
                    "model": self._dice.choice(("tiny", "tiny", *ADAPTERS)),
                    "prompt": prompt,
                    "max_tokens": length,
                    "temperature": self._dice.choice((0, 1)),
                    "ignore_eos": True,
                    # Urgent ones are admitted to a full cache, and others have to give way.
                    "priority": self._dice.choice(("normal", "normal", "normal", "high")),
                },
                (self.secret * 6)[begun : begun + length],
            )

    async def _whole(self, body, expected):
        await self._post(body, [expected])

    async def _twice(self, body, expected):
        await self._post({**body, "n": 2}, [expected] * 2)

    async def _in_a_grammar(self, body, expected):
        await self._post({**body, "ignore_eos": False, "structured_outputs": {"regex": expected}}, [expected])

    async def _post(self, body, expected):
        answer = await self._http.post("/v1/completions", json=body, headers=self._headers)
        if answer.status_code == 503:
            return await self._shed()
        assert answer.status_code == 200, answer.text
        said = answer.json()
        assert said["usage"]["prompt_tokens"] == len(body["prompt"])
        for choice, text in zip(said["choices"], expected, strict=True):
            self._compare(choice["text"], text)
        self._outcomes["answered"] += 1

    async def _streamed(self, body, expected):
        await self._stream(body, expected, len(expected) + 1)

    async def _aborted(self, body, expected):
        await self._stream(body, expected, self._dice.randint(1, 8))

    async def _stream(self, body, expected, most):
        """Reads at most that many events, and hangs up."""
        text = ""
        asked = self._http.stream(
            "POST", "/v1/completions", json={**body, "stream": True}, headers=self._headers
        )
        async with asked as answer:
            if answer.status_code == 503:
                return await self._shed()
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    most -= 1
                if most == 0:
                    self._outcomes["aborted"] += 1
                    break
        self._compare(text, expected if most else expected[: len(text)])
        self._outcomes["answered"] += bool(most)

    async def _shed(self):
        self._outcomes["shed"] += 1
        await asyncio.sleep(self._dice.uniform(0.05, 0.2))

    def _compare(self, text, expected):
        assert set(SECRET.findall(text)) <= {self.secret}, f"{self.secret} was told a foreign secret: {text}"
        assert text == expected


async def ask_as_all(server, seconds, enough_answers):
    """All clients ask for so long, and until so many of their requests were answered; what became of them."""
    outcomes, begun = Counter(), time.monotonic()

    def is_over():
        return time.monotonic() >= begun + seconds * (1 if outcomes["answered"] >= enough_answers else 2)

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60, verify=NO_TLS, limits=limits) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(CLIENTS):
            group.create_task(Client(number, http, outcomes).ask_until(is_over))
    return outcomes


@pytest.mark.deep
def test_no_answer_holds_anything_of_another_client_s_prompt(server):
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request takes longer than asking
    outcomes = asyncio.run(ask_as_all(server, 60 * MINUTES, ENOUGH_ANSWERS))

    happened = {
        name: server.metric(f"llm_{name}_total")
        for name in ("preemptions", "prefix_cache_hit_tokens", "kv_cache_evictions")
    }
    happened["aborted"] = server.metric("llm_requests_total", status="aborted")
    happened["drafts"] = server.metric("llm_spec_decode_accepted_tokens_per_pos_total", position="0")
    happened["swapped"] = server.metric("llm_kv_tier_loaded_blocks_total", tier="host")
    logging.getLogger(__name__).info("%g minutes: %s", MINUTES, dict(outcomes) | happened)
    assert all(happened.values()), happened
    assert outcomes["answered"] >= ENOUGH_ANSWERS, outcomes
    server.wait("no block is lost", lambda: server.metric("llm_active_requests") == 0)
    assert server.metric("llm_kv_blocks_unaccounted") == 0
