"""Metrics of objects that are gone: as many series as there were before them."""

import types

import pytest

from quire_gateway.dispatch import Dispatcher
from quire_gateway.gone_series import KEPT_SECONDS
from quire_gateway.management import Management
from quire_gateway.metrics import Metrics
from quire_gateway.replicas import ReplicaTable
from quire_gateway.routing.by_load import RoundRobin
from quire_gateway.routing_state import RoutingState
from quire_gateway.settings import Timeouts
from quire_gateway.usage import Usage
from tests.gateway.kube_stub import NAMESPACE, endpoint_slice, llm_object


class Scraped:
    """A gateway's objects and metrics in this process."""

    def __init__(self, clock):
        self.clock = clock
        table = ReplicaTable((NAMESPACE,), 0, clock, lambda _: RoundRobin())
        table.put(endpoint_slice("s", {"a": "127.0.0.1"}))
        self.state = RoutingState()
        self.metrics = Metrics(table, clock)
        dispatcher = Dispatcher(table, self.state, Timeouts())
        self.management = Management(dispatcher, self.metrics, None, (), 0)

    def request(self, model, client):
        """Counts in each metric with one of these labels."""
        metrics = self.metrics
        metrics.begun()
        metrics.ended(model, client, "success", 1.0, 0.1)
        metrics.took(model, client, Usage(1, 2, 3))
        metrics.picked(model, "load")
        metrics.predicted(model, True, False)
        metrics.retried(model, "reset", is_resumed=True)
        metrics.cache_hit(model)
        metrics.fell_back(model, "canned")
        metrics.classified(model, "timeout")
        metrics.shadowed(model, "full")
        metrics.held(model, 1)
        metrics.held(model, -1)
        metrics.hold_ended(model, "released", 1.0)

    async def series(self, after=0.0):
        """The lines of a scrape, so many seconds later."""
        self.clock.now += after
        found = []

        async def whole(status, text, kind):
            found.extend(line for line in text.decode().splitlines() if not line.startswith("#"))

        await self.management.get(types.SimpleNamespace(scope={"path": "/metrics"}, whole=whole))
        return found

    async def series_when_gone(self):
        """After all that is gone was noticed."""
        await self.series(60)
        return await self.series(KEPT_SECONDS)


@pytest.fixture
def scraped(clock):
    return Scraped(clock)


async def test_a_hundred_deleted_clients_and_routes_leave_no_series(scraped):
    scraped.request("tiny", "")
    before = await scraped.series_when_gone()
    for number in range(100):
        client = llm_object("LLMClient", f"c-{number}", {"keyHashes": []})
        rules = [{"targets": [{"deployment": "tiny"}]}]
        route = llm_object("LLMRoute", f"r-{number}", {"models": [f"m-{number}"], "rules": rules})
        scraped.state.clients.put(client)
        scraped.state.routes.put(route)
        scraped.request(f"m-{number}", f"{NAMESPACE}/c-{number}")
    there = await scraped.series_when_gone()
    assert len(there) > len(before) + 3_000
    for number in range(100):
        scraped.state.clients.remove(scraped.state.clients.get((NAMESPACE, f"c-{number}")))
        scraped.state.routes.remove(scraped.state.routes.get((NAMESPACE, f"r-{number}")))
    assert len(await scraped.series()) == len(there), "what was counted last is scraped"
    assert [one.partition(" ")[0] for one in await scraped.series_when_gone()] == [
        one.partition(" ")[0] for one in before
    ]


async def test_of_a_client_that_is_deleted_the_series_of_its_models_stay(scraped):
    scraped.state.clients.put(alice := llm_object("LLMClient", "alice", {"keyHashes": []}))
    for client in ("", f"{NAMESPACE}/alice"):
        scraped.request("tiny", client)
    scraped.state.clients.remove(alice)
    text = "\n".join(await scraped.series_when_gone())
    assert "alice" not in text
    assert 'gateway_requests_total{client="",model="tiny",status="success"} 1.0' in text
    assert 'gateway_picks_total{model="tiny",reason="load"} 2.0' in text


async def test_one_that_is_made_anew_soon_goes_on_with_its_numbers(scraped):
    scraped.state.clients.put(alice := llm_object("LLMClient", "alice", {"keyHashes": []}))
    scraped.request("tiny", f"{NAMESPACE}/alice")
    scraped.state.clients.remove(alice)
    await scraped.series(KEPT_SECONDS - 60)
    scraped.state.clients.put(alice)
    await scraped.series(60)
    assert "alice" in "\n".join(await scraped.series_when_gone())


async def test_targets_that_have_no_pod_and_backends_are_there_as_well(scraped):
    target, backend = {"deployment": "asleep"}, {"external": "outside"}
    spec = {"models": ["chat"], "rules": [{"targets": [target, backend]}]}
    scraped.state.routes.put(llm_object("LLMRoute", "r", spec))
    spec = {"baseURL": "https://api.example.com/v1", "model": "gpt"}
    scraped.state.externals.put(llm_object("LLMExternalBackend", "outside", spec))
    scraped.state.deployments.put(llm_object("LLMDeployment", "alone", {}))
    names = ("chat", "asleep", "external/outside", "alone", "tiny")
    for name in names:
        scraped.request(name, "")
    text = "\n".join(await scraped.series_when_gone())
    assert all(f'model="{name}"' in text for name in names)
