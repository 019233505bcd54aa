"""The engine dies at any moment under load: nobody hangs, and the next start answers as the first did."""

import asyncio
import os
import random
import signal
import threading

import pytest

from tests.server import tiny_model
from tests.server.launch import Server
from tests.soak import swarm

KILLS = int(os.environ.get("SOAK_KILLS", "8"))
pytestmark = [pytest.mark.soak, pytest.mark.timeout(60 + 30 * KILLS)]

FIXED = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}


class Load(threading.Thread):
    """A swarm beside the test, which kills meanwhile."""

    def __init__(self, base_url, seed):
        super().__init__(daemon=True)
        self._base_url, self._seed = base_url, seed

    def run(self):
        self.tally = asyncio.run(swarm.run(self._base_url, num_clients=8, seconds=30, seed=self._seed))


def ask(server):
    with server.client() as client:
        return client.completions.create(**FIXED, extra_body={"ignore_eos": True}).choices[0].text


def test_an_engine_that_is_killed_at_any_moment_leaves_no_request_without_an_end(tmp_path):
    model, dice = tiny_model.write(tmp_path / "tiny"), random.Random(7)
    golden = ""
    for number in range(KILLS):
        with Server(model, tmp_path, "--max-num-seqs", "4") as server:
            server.wait_ready()
            golden = golden or ask(server)
            assert ask(server) == golden, f"after {number} kills"
            load = Load(server.url + "/v1", number)
            load.start()
            server.wait("they are at work", lambda: server.metric("llm_active_requests") >= 4)
            threading.Event().wait(dice.uniform(0, 1.5))
            os.kill(server.children()["engine"], signal.SIGKILL)
            load.join(20)
            assert not load.is_alive(), "a request hangs"
            assert "hung" not in load.tally.broken
            assert server.wait_end() == 137
            assert "ended by SIGKILL" in server.log.read_text()
