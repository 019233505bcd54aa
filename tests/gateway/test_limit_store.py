"""Three real gateways before one limit store, under floods, and while the store fails in each way."""

import asyncio
import contextlib
import hashlib
import json
import threading
import time

import aiohttp
import httpx
import pytest
from aiohttp import web

from tests.gateway.fault_proxy import FaultProxy
from tests.gateway.kube_stub import NAMESPACE, KubeStub, endpoint_slice, llm_object
from tests.gateway.launch import Gateway
from tests.gateway.limit_store_server import StoreServer
from tests.server.launch import NO_TLS

CHAT = "/v1/chat/completions"
TAKES = 50  # tokens of each answer
WAITS = 8  # requests that wait for an answer, of each flood at each gateway


class Replica:
    """Answers at once, but for prompts that say `hold`, which wait until it is let go."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self.held = 0
        self._go = asyncio.Event()
        started = threading.Event()
        threading.Thread(target=self._run, args=(started,), daemon=True).start()
        started.wait()

    def _run(self, started):
        async def start():
            app = web.Application()
            app.router.add_post(CHAT, self._answer)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]
            started.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    async def _answer(self, request):
        if b"hold" in await request.read():
            self.held += 1
            await self._go.wait()
        usage = {"prompt_tokens": 10, "completion_tokens": TAKES - 10, "total_tokens": TAKES}
        return web.json_response({"choices": [], "usage": usage})

    def let_go(self):
        def go():
            self._go.set()
            self._go = asyncio.Event()

        self._loop.call_soon_threadsafe(go)


class Fleet:
    """The gateways, their store behind a proxy, and clients by name."""

    def __init__(self, kube, store, proxy, replica, directory):
        self.kube, self.store, self.proxy, self.replica = kube, store, proxy, replica
        self._directory = directory
        self.gateways = []
        self.num_started = 0

    def start(self, **environ):
        self.num_started += 1
        name = f"g-{self.num_started}"
        directory = self._directory / name
        directory.mkdir()
        # 50 ms are little on a machine on which everything else runs as well.
        environ = {"POD_NAMESPACE": NAMESPACE, "POD_NAME": name, "LIMIT_STORE_SECONDS": 2, **environ}
        gateway = Gateway(self.kube.url, directory, LIMIT_STORE_URL_FILE=self.store.url_file, **environ)
        self.gateways.append(gateway)
        return gateway

    @contextlib.contextmanager
    def another(self, **environ):
        """A gateway more, that has the store."""
        try:
            with self.start(POD_NAMESPACE="", **environ) as gateway:
                gateway.wait_replicas(1)
                gateway.wait("it has the store", lambda: gateway.metric("gateway_limit_store_up") == 1)
                yield gateway
        finally:
            self.gateways.pop()

    def wait(self):
        for one in self.gateways:
            one.wait_replicas(1)
        self.wait_store(1)
        return self

    def wait_store(self, is_up):
        for one in self.gateways[:3]:
            one.wait(f"up is {is_up}", lambda one=one: one.metric("gateway_limit_store_up") == is_up)

    def client(self, name, **spec):
        """Makes one, which every gateway knows and counts three gateways for."""
        digest = hashlib.sha256(name.encode()).hexdigest()
        self.kube.put(llm_object("LLMClient", name, {"keyHashes": [digest], **spec}))
        headers = {"authorization": f"Bearer {name}"}

        def applied():
            status = self.kube.objects["llmclients"][name].get("status") or {}
            return status.get("gateways") == {"seen": 3, "applied": 3}

        self.gateways[0].wait("every gateway has the client", applied)
        for one in self.gateways:
            models = f"{one.url}/v1/models"
            one.wait(
                "its key",
                lambda models=models: httpx.get(models, headers=headers, verify=NO_TLS).status_code == 200,
            )
        return headers

    def flood(self, headers, seconds=2.0, meanwhile=None, **body):
        """Ask all gateways at once until, after the last one that is admitted at once, this time has passed.
        The statuses, and how long it took.
        """
        return asyncio.run(self._flood(headers, seconds, meanwhile, body))

    async def _flood(self, headers, seconds, meanwhile, body):
        statuses, begun = [], time.monotonic()
        refused = set()
        until = [float("inf")]
        text = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Once"}], **body})

        async def ask(session, gateway):
            while time.monotonic() < until[0]:
                async with session.post(gateway.url + CHAT, data=text, headers=headers) as answer:
                    await answer.read()
                statuses.append(answer.status)
                if answer.status != 200:
                    refused.add(gateway)
                    if len(refused) == 3 and until[0] == float("inf"):
                        until[0] = time.monotonic() + seconds
                    await asyncio.sleep(0.02)  # still a hundred times what the limit lets in

        async def fault():
            if meanwhile is not None:
                while len(statuses) < 100:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(meanwhile)

        async with aiohttp.ClientSession() as session:
            asks = (ask(session, one) for one in self.gateways[:3] for _ in range(WAITS))
            await asyncio.gather(fault(), *asks)
        return statuses, time.monotonic() - begun


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fleet")
    replica = Replica()
    with KubeStub() as kube, StoreServer(directory) as store, FaultProxy(store.port) as proxy:
        store.write_url(proxy.port)
        kube.put(endpoint_slice("s", {"a": "127.0.0.1"}, port=replica.port))
        with contextlib.ExitStack() as stack:
            fleet = Fleet(kube, store, proxy, replica, directory)
            for _ in range(3):
                stack.enter_context(fleet.start())
            yield fleet.wait()


@pytest.mark.deep
def test_a_flood_over_three_gateways_gets_the_requests_of_the_limit(fleet):
    headers = fleet.client("requests", limits={"requestsPerMinute": 600})
    before = evaluations(fleet)
    statuses, seconds = fleet.flood(headers)
    there = 600 + 10 * seconds
    assert 0.99 * there - 10 <= statuses.count(200) <= 1.01 * there
    assert set(statuses) == {200, 429}
    assert evaluations(fleet) - before < len(statuses), "what is refused costs the store nothing"


def evaluations(fleet):
    return fleet.store.client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]


@pytest.mark.deep
def test_a_flood_over_three_gateways_gets_the_tokens_of_the_limit(fleet):
    headers = fleet.client("tokens", limits={"tokensPerMinute": 30_000})
    statuses, seconds = fleet.flood(headers, max_tokens=200)
    there = 30_000 + 500 * seconds
    assert 0.99 * there - 1000 <= TAKES * statuses.count(200) <= 1.01 * there
    assert set(statuses) == {200, 429}


def kill(fleet):
    fleet.store.kill()


def stop(fleet):
    fleet.store.stop()


def restart(fleet):
    fleet.store.kill()
    fleet.wait_store(0)
    fleet.store.start()


def slow(fleet):
    fleet.proxy.delay = 5.0


def wrong_password(fleet):
    fleet.store.client.config_set("requirepass", "another")
    fleet.store.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


@pytest.fixture
def mended(fleet):
    yield
    fleet.proxy.delay = 0.0
    fleet.proxy.target = fleet.store.port
    fleet.store.go_on()
    fleet.store.kill()
    fleet.store.start()
    fleet.wait_store(1)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (kill, "connection"),
        pytest.param(restart, "connection", marks=pytest.mark.deep),
        pytest.param(stop, "timeout", marks=pytest.mark.deep),
        pytest.param(slow, "timeout", marks=pytest.mark.deep),
        (wrong_password, "auth"),
    ],
)
def test_without_the_store_no_request_fails_and_the_limit_holds_within_a_tenth(fleet, mended, fault, reason):
    headers = fleet.client(fault.__name__.replace("_", "-"), limits={"requestsPerMinute": 600})
    failed = errors(fleet, reason)

    def break_it():
        fault(fleet)
        fleet.gateways[0].wait("it is noticed", lambda: errors(fleet, reason) > failed)
        if fault is not restart:
            fleet.wait_store(0)

    statuses, seconds = fleet.flood(headers, meanwhile=break_it)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) <= 1.1 * (600 + 10 * seconds)
    assert statuses.count(200) >= 500
    assert not any("word@" in one.log.read_text() for one in fleet.gateways), "of the URL"


def errors(fleet, reason):
    """Of the gateway that has fewest."""
    numbers = []
    for one in fleet.gateways[:3]:
        with contextlib.suppress(AssertionError):
            numbers.append(one.metric("gateway_limit_store_errors_total", reason=reason))
    return min(numbers) if len(numbers) == 3 else 0


def test_after_the_store_is_back_limits_are_exact_again(fleet, mended):
    fleet.store.stop()
    fleet.wait_store(0)
    fleet.store.go_on()
    fleet.wait_store(1)
    headers = fleet.client("again", limits={"requestsPerMinute": 300})
    statuses, seconds = fleet.flood(headers, seconds=1)
    there = 300 + 5 * seconds
    assert 0.99 * there - 5 <= statuses.count(200) <= 1.01 * there


@pytest.mark.parametrize("broken", ["type", "entry"])
def test_what_something_else_wrote_in_place_of_a_client_is_replaced(fleet, broken):
    headers = fleet.client(f"broken-{broken}", limits={"concurrentRequests": 1})
    key = f"quire:client:{fleet.kube.objects['llmclients'][f'broken-{broken}']['metadata']['uid']}"
    fleet.store.client.delete(key)
    if broken == "type":
        fleet.store.client.set(key, "no hash")
    else:
        fleet.store.client.hset(key, mapping={"gateway:other": "no numbers", "gateway:g-9": "9e15 a b c"})
    with running(fleet, headers, 1):
        assert ask(fleet.gateways[1], headers).status_code == 429, "the limit holds beside the key"
    fleet.gateways[1].wait("its slot", lambda: ask(fleet.gateways[1], headers).status_code == 200)
    assert fleet.gateways[0].metric("gateway_limit_store_up") == 1


def test_a_store_that_is_replaced_by_an_empty_one_is_told_what_its_gateway_holds(fleet, mended, tmp_path):
    headers = fleet.client("replaced", budget={"tokens": 3 * (TAKES + 10)})
    gateway = fleet.gateways[0]
    losses = gateway.metric("gateway_limit_store_losses_total")
    with running(fleet, headers, 2), StoreServer(tmp_path) as empty:
        fleet.proxy.target = empty.port
        fleet.store.kill()
        assert race([gateway], headers).count(200) == 1, "the two that run hold the rest of the budget"
        assert "the limit store has lost its data" in gateway.log.read_text(), "the fault takes effect"
        assert gateway.metric("gateway_limit_store_losses_total") == losses


@contextlib.contextmanager
def running(fleet, headers, number):
    """So many requests of one client of the first gateway wait at the replica."""
    before = fleet.replica.held
    asked = [
        threading.Thread(
            target=lambda: quiet(lambda: ask(fleet.gateways[0], headers, "hold", max_tokens=TAKES))
        )
        for _ in range(number)
    ]
    for each in asked:
        each.start()
    fleet.gateways[0].wait("they run", lambda: fleet.replica.held == before + number)
    try:
        yield
    finally:
        fleet.replica.let_go()
        for each in asked:
            each.join()


def store_events(fleet):
    events = sorted(fleet.kube.objects.get("events", {}).values(), key=lambda one: one["eventTime"])
    events = [one for one in events if one["reason"].startswith("LimitStore")]
    return [one for one in events if one["regarding"]["name"] == "g-1"]


def test_each_loss_of_the_store_and_each_return_is_one_event_whatever_number_of_requests_sees_it(
    fleet, mended
):
    headers = fleet.client("watched", limits={"requestsPerMinute": 600})
    gateway, number = fleet.gateways[0], len(store_events(fleet))
    losses = gateway.metric("gateway_limit_store_losses_total")
    for _ in range(2):
        fleet.store.kill()
        fleet.wait_store(0)
        assert {ask(gateway, headers).status_code for _ in range(20)} == {200}
        fleet.store.start()
        fleet.wait_store(1)
        gateway.wait("it is said", lambda there=number + 2: len(store_events(fleet)) >= there)
        lost, back = store_events(fleet)[number:]
        assert {lost["reason"], back["reason"]} == {"LimitStoreLost", "LimitStoreBack"}
        assert {lost["type"], back["type"]} == {"Warning", "Normal"}
        assert lost["regarding"]["kind"] == "Lease"
        number += 2
    assert gateway.metric("gateway_limit_store_losses_total") == losses + 2


def test_with_deny_limited_clients_get_503_and_others_their_answers(fleet, mended):
    limited = fleet.client("limited", limits={"requestsPerMinute": 600})
    free = fleet.client("free")
    with fleet.another(LIMIT_STORE_ON_LOSS="Deny") as gateway:
        assert ask(gateway, limited).status_code == 200
        fleet.store.kill()
        gateway.wait("it is lost", lambda: gateway.metric("gateway_limit_store_up") == 0)
        answer = ask(gateway, limited)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "limit_store_unavailable")
        assert answer.headers["retry-after"] == "1"
        assert ask(gateway, free).status_code == 200


def ask(gateway, headers, prompt="Once", **body):
    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], **body}
    return httpx.post(gateway.url + CHAT, json=body, headers=headers, timeout=120, verify=NO_TLS)


@pytest.mark.deep
def test_the_slots_of_a_killed_gateway_come_back(fleet):
    headers = fleet.client("slots", limits={"concurrentRequests": 2})
    with fleet.another() as lost:
        before = fleet.replica.held
        for _ in range(2):
            threading.Thread(target=lambda: quiet(lambda: ask(lost, headers, "hold")), daemon=True).start()
        lost.wait("both run", lambda: fleet.replica.held == before + 2)
        assert ask(fleet.gateways[0], headers).status_code == 429, "the fault takes effect"
        lost.process.kill()
        fleet.gateways[0].wait("a slot", lambda: ask(fleet.gateways[0], headers).status_code == 200)
        fleet.replica.let_go()


def quiet(work):
    with contextlib.suppress(httpx.HTTPError):
        return work()


def test_of_fifty_at_once_for_a_budget_of_one_exactly_one_is_admitted(fleet):
    headers = fleet.client("budget", budget={"tokens": TAKES + 10})
    answers = race(fleet.gateways[:3], headers)
    assert sorted(answers) == [200] + 49 * [429]


def test_one_gateway_without_a_store_keeps_a_budget_as_well(fleet, tmp_path):
    headers = fleet.client("alone", budget={"tokens": TAKES + 10})
    with Gateway(fleet.kube.url, tmp_path) as gateway:
        gateway.wait_replicas(1)
        assert sorted(race([gateway], headers)) == [200] + 49 * [429]


def race(gateways, headers):
    """The statuses of fifty requests at once, of which each may take all that there is."""
    text = json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "Once"}], "max_tokens": TAKES}
    )

    async def ask(session, gateway):
        async with session.post(gateway.url + CHAT, data=text, headers=headers) as answer:
            return answer.status

    async def all_at_once():
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(ask(session, gateways[n % len(gateways)]) for n in range(50)))

    return asyncio.run(all_at_once())


def test_a_gateway_without_a_readable_url_does_not_start(fleet, tmp_path):
    file = tmp_path / "url"
    file.write_text("http://:hunter2@host")
    gateway = Gateway(fleet.kube.url, tmp_path, LIMIT_STORE_URL_FILE=file)
    assert gateway.wait_end() == 2
    assert "has to be redis://" in gateway.log.read_text() and "hunter2" not in gateway.log.read_text()
