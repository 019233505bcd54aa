"""Streams through a gateway while its replicas are replaced, scaled and drained, and while gateways are.

Pods are real servers, which drain as they do in a cluster: first they leave their Service, then they get
SIGTERM. Clients keep no connection: a Service would send each new one to a gateway that is ready.
"""

import asyncio
import itertools
import os
import random
import threading
from dataclasses import dataclass, field

import aiohttp
import pytest

from tests.gateway.conftest import slice_of
from tests.gateway.kube_stub import KubeStub
from tests.gateway.launch import Gateway
from tests.server import tiny_model
from tests.server.launch import Server

STREAMS = int(os.environ.get("CHURN_STREAMS", "150"))
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600 + STREAMS)]

PATH = "/v1/chat/completions"
FLAGS = ("--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "64")
CONCURRENT = 48
TOKENS = 150


@dataclass
class Load(threading.Thread):
    """So many streams at a time until it is stopped, each to a gateway that is ready, of its own length."""

    gateways: list
    concurrent: int = CONCURRENT
    tokens: int = TOKENS
    answered: int = 0
    open: int = 0
    broken: list = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    __hash__ = threading.Thread.__hash__

    def __post_init__(self):
        super().__init__(daemon=True)

    def run(self):
        asyncio.run(self._run())

    async def _run(self):
        numbers = itertools.count()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(self._client(session, numbers) for _ in range(self.concurrent)))

    async def _client(self, session, numbers):
        while not self.is_over.is_set():
            await self._ask(session, next(numbers))

    async def _ask(self, session, number):
        """Not greedy and without a seed, so that nothing goes on elsewhere: a lost replica would be seen."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"Tell me about {number}."}]}
        body |= {"stream": True, "ignore_eos": True, "temperature": 1.0}
        body |= {"max_tokens": random.Random(number).randint(1, 2 * self.tokens)}
        url = random.choice(self.gateways).url
        self.open += 1
        try:
            async with session.post(url + PATH, json=body) as answer:
                text = await answer.text()
            if answer.status == 200 and text.endswith("data: [DONE]\n\n"):
                self.answered += 1
            else:
                self.broken.append(f"{answer.status}: {text[-300:]}")
        except aiohttp.ClientError as error:
            self.broken.append(repr(error))
        finally:
            self.open -= 1

    def wait_answered(self, gateway, more):
        goal = self.answered + more
        gateway.wait(f"{more} more answers", lambda: self.broken or self.answered >= goal, 300)
        assert self.broken == []

    def finish(self):
        self.is_over.set()
        self.join(300)
        assert not self.is_alive()


class Pods:
    """The replicas, as a Deployment has them."""

    def __init__(self, kube, directory):
        self._kube, self._directory = kube, directory
        self._model = tiny_model.write(directory / "tiny")
        self._numbers = itertools.count()
        self.running, self.leaving = {}, []

    def start(self, number):
        """So many more; they are in the Service once they are ready."""
        uids = [f"pod-{next(self._numbers)}" for _ in range(number)]
        for uid in uids:
            (self._directory / uid).mkdir()
            self.running[uid] = Server(self._model, self._directory / uid, *FLAGS)
        for uid in uids:
            self._kube.put(slice_of(uid, self.running[uid].wait_ready()))
        return uids

    def leave(self, uid):
        """It leaves the Service, and is asked to end."""
        self._kube.remove(f"tiny-{uid}")
        server = self.running.pop(uid)
        server.terminate()
        self.leaving.append(server)

    def wait_left(self):
        """All that were asked to have ended, without an error."""
        for server in self.leaving:
            assert server.wait_end() == 0
        self.leaving.clear()

    def close(self):
        for server in (*self.running.values(), *self.leaving):
            server.__exit__(None)


@pytest.fixture
def world(tmp_path):
    """Starts gateways before the same pods."""
    with KubeStub() as kube:
        pods, gateways = Pods(kube, tmp_path), []

        def gateway():
            folder = tmp_path / f"gateway-{len(gateways)}"
            folder.mkdir()
            gateways.append(Gateway(kube.url, folder, DRAIN_SECONDS=300))
            return gateways[-1]

        try:
            yield pods, gateway
        finally:
            for each in gateways:
                each.__exit__(None)
            pods.close()


def test_no_stream_breaks_while_replicas_are_replaced_scaled_and_drained(world):
    pods, gateway = world
    first = pods.start(4)
    front = gateway().wait_replicas(4)
    load = Load([front])
    load.start()
    load.wait_answered(front, STREAMS // 10)

    for uid in first:  # a rollout
        pods.start(1)
        pods.leave(uid)
        load.wait_answered(front, STREAMS // 20)
        pods.wait_left()
    for uid in list(pods.running)[:2]:  # 4 to 2
        pods.leave(uid)
    load.wait_answered(front, STREAMS // 5)
    pods.wait_left()
    pods.start(2)  # and back to 4
    front.wait_replicas(4)
    load.wait_answered(front, STREAMS // 5)
    pods.leave(next(iter(pods.running)))  # its node is drained
    load.wait_answered(front, STREAMS // 4)
    pods.wait_left()
    load.wait_answered(front, max(0, STREAMS - load.answered))
    load.finish()

    assert load.broken == []
    assert load.answered >= STREAMS


def test_no_stream_breaks_while_gateways_are_replaced_under_very_many_of_them(world):
    pods, gateway = world
    pods.start(2)
    ready = [gateway().wait_replicas(2), gateway().wait_replicas(2)]
    old = list(ready)
    load = Load(ready, concurrent=STREAMS // 2)
    load.start()
    for each in old:
        each.wait("streams are open", lambda: load.broken or load.open == load.concurrent)
        after = gateway().wait_replicas(2)
        ready[ready.index(each)] = after  # it leaves the Service, in which its successor is
        assert each.metric("gateway_requests_in_flight") > 0, "it is replaced while it has streams"
        each.terminate()
        load.wait_answered(after, STREAMS // 2)
    assert [each.wait_end() for each in old] == [0, 0]
    load.finish()

    assert load.broken == []
