"""The engine is killed at any moment under load: no client hangs, and the next start answers as the first
did.
"""

import asyncio
import os
import random
import signal
import threading
import time

import pytest

from tests.server import tiny_model
from tests.server.launch import Server
from tests.soak import swarm

KILLS = int(os.environ.get("SOAK_KILLS", "8"))
pytestmark = [pytest.mark.soak, pytest.mark.timeout(60 + 30 * KILLS)]

FIXED = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}


#: The two ways in which a client may hear of it: a 503 with this code, or this as the stream's last event.
UNAVAILABLE = "engine_unavailable"
GONE = "the engine ended while it worked on this request"


class Load(threading.Thread):
    """A swarm beside the test, which kills meanwhile."""

    def __init__(self, server, seed):
        super().__init__(daemon=True)
        self._base_url, self._seed = server.url + "/v1", seed
        self.start()

    def run(self):
        self._tally = asyncio.run(swarm.run(self._base_url, num_clients=8, seconds=30, seed=self._seed))

    def check(self, killed_at):
        """The tally, once all have ended: each with an answer, or with a clean error that says what happened.
        Only who asked later may lose the connection.
        """
        self.join(60)
        assert not self.is_alive(), "a request hangs"
        tally = self._tally
        assert set(tally.broken) <= {GONE, "APIConnectionError"}, tally
        assert set(tally.shed) <= {UNAVAILABLE, "load_shed", "memory_pressure"}, tally
        assert all(begun > killed_at for begun in tally.disconnected), tally
        return tally


def kill_engine(server):
    """When it was."""
    killed_at = time.monotonic()
    os.kill(server.children()["engine"], signal.SIGKILL)
    return killed_at


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
            load = Load(server, number)
            server.wait("they are at work", lambda: server.metric("llm_active_requests") >= 4)
            threading.Event().wait(dice.uniform(0, 1.5))
            tally = load.check(kill_engine(server))
            assert tally.shed[UNAVAILABLE] + tally.broken[GONE] >= 4, tally
            assert server.wait_end() == 137
            assert "ended by SIGKILL" in server.log.read_text()


def test_an_engine_that_is_killed_while_it_starts_leaves_no_request_without_an_end(tmp_path):
    model, dice = tiny_model.write(tmp_path / "tiny"), random.Random(8)
    for number, phase in enumerate(("loading", "warming")):
        with Server(model, tmp_path, fault="slow_load:after=0.1") as server:
            server.wait(phase, lambda s=server, p=phase: s.probe("livez") and s.statusz()["phase"] == p, 60)
            load = Load(server, number)
            if phase == "loading":
                server.wait_fault("slow_load")
                threading.Event().wait(dice.uniform(0, 0.5))
            tally = load.check(kill_engine(server))
            assert tally.answered == 0
            assert server.wait_end() == 137


def test_requests_just_after_the_engine_was_killed_get_an_error(tmp_path):
    model = tiny_model.write(tmp_path / "tiny")
    with Server(model, tmp_path, fault="stalled_load") as server:
        server.wait("the API answers", lambda: server.reaches("/version"))
        server.wait_fault("stalled_load")
        kill_engine(server)
        tally = Load(server, 0).check(0.0)
        assert tally.shed[UNAVAILABLE] >= 1, tally
        assert server.wait_end() == 137


def test_an_engine_that_is_killed_while_it_drains_leaves_no_request_without_an_end(tmp_path):
    model, dice = tiny_model.write(tmp_path / "tiny"), random.Random(9)
    for number in range(max(1, KILLS // 4)):
        with Server(model, tmp_path, "--max-num-seqs", "4") as server:
            server.wait_ready()
            load = Load(server, number)
            server.wait("they are at work", lambda s=server: s.metric("llm_active_requests") >= 4)
            server.terminate()
            server.wait("it drains", lambda s=server: s.probe("readyz") == 503)
            threading.Event().wait(dice.uniform(0, 0.1))
            load.check(kill_engine(server))
            assert server.wait_end() == 137
