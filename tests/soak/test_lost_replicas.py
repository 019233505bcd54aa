"""Replicas are killed under streams of a gateway that are greedy or seeded: each is whole, and the same."""

import asyncio
import os
import random
import signal
import threading

import httpx
import pytest

from tests.gateway.conftest import slice_of
from tests.gateway.kube_stub import KubeStub
from tests.gateway.launch import Gateway
from tests.gateway.test_relay import text_of
from tests.server import tiny_model
from tests.server.launch import Server

KILLS = int(os.environ.get("REPLICA_KILLS", "6"))
pytestmark = [pytest.mark.soak, pytest.mark.timeout(120 + 60 * KILLS)]

PATH, FLAGS = "/v1/chat/completions", ("--kv-cache-memory-bytes", str(32 << 20))
STREAMS = 12


def body_of(number):
    exact = {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number}
    message = {"role": "user", "content": f"Tell me about {number}."}
    return {"model": "tiny", "messages": [message], "max_tokens": 400, "ignore_eos": True, **exact}


async def stream_all(url):
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        bodies = [{**body_of(number), "stream": True} for number in range(STREAMS)]
        return await asyncio.gather(*(client.post(PATH, json=body) for body in bodies))


class Streams(threading.Thread):
    """All streams at once, beside the test, which kills meanwhile."""

    def __init__(self, gateway):
        super().__init__(daemon=True)
        self._url, self.answers = gateway.url, []
        self.start()

    def run(self):
        self.answers = asyncio.run(stream_all(self._url))


def total(gateway, name):
    lines = httpx.get(gateway.url + "/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def kill(server, victim):
    """The whole pod, or the engine's process in it, of which the stream hears in an event."""
    for pid in server.children().values() if victim == "pod" else [server.children()["engine"]]:
        os.kill(pid, signal.SIGKILL)
    if victim == "pod":
        server.process.kill()
    server.wait_end()


def test_a_stream_whose_replica_is_killed_at_any_moment_is_whole_and_the_same(tmp_path):
    model, dice = tiny_model.write(tmp_path / "tiny"), random.Random(11)

    def started(uid, number):
        directory = tmp_path / f"{uid}-{number}"
        directory.mkdir()
        return Server(model, directory, *FLAGS)

    with KubeStub() as kube, Gateway(kube.url, tmp_path) as gateway:
        servers = {uid: started(uid, 0) for uid in ("one", "two")}
        try:
            for server in servers.values():
                server.wait_ready()
            golden = [text_of(servers["one"].post(PATH, body_of(number)).text) for number in range(STREAMS)]
            for number in range(1, KILLS + 1):
                pods = {uid: f"{uid}-{number}" for uid in servers}
                for uid, server in servers.items():
                    body = slice_of(pods[uid], server)
                    body["metadata"]["name"] = f"tiny-{uid}"
                    kube.put(body)
                gateway.wait_replicas(2)
                gateway.wait("both are known", lambda p=pods: {*p.values()} <= known(gateway))
                begun, streams = total(gateway, "gateway_picks_total"), Streams(gateway)
                gateway.wait("streams", lambda b=begun: total(gateway, "gateway_picks_total") >= b + STREAMS)
                threading.Event().wait(dice.uniform(0, 0.3))  # a moment by chance
                victim = dice.choice(("one", "two"))
                kill(servers[victim], dice.choice(("pod", "engine")))
                streams.join(120)
                assert [answer.status_code for answer in streams.answers] == [200] * STREAMS
                assert [text_of(answer.text) for answer in streams.answers] == golden, f"kill {number}"
                assert all(answer.text.endswith("data: [DONE]\n\n") for answer in streams.answers)
                servers[victim] = started(victim, number).wait_ready()
            assert total(gateway, "gateway_resumed_streams_total") >= KILLS, "kills met streams"
        finally:
            for server in servers.values():
                server.__exit__(None)


def known(gateway):
    """The pods in the metrics of the gateway."""
    lines = httpx.get(gateway.url + "/metrics").text.splitlines()
    name = "gateway_replica_requests_in_flight{"
    return {line.split('replica="')[1].split('"')[0] for line in lines if line.startswith(name)}
