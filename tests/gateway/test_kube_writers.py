"""What a gateway writes to an API server that refuses or is silent: it goes on, and writes it later."""

import asyncio
import contextlib
import logging
import time

import pytest

from quire_gateway import demand_writer, status_writer, usage_writer
from quire_gateway.demand_writer import DemandWriter
from quire_gateway.gateway_leases import GatewayLeases, lease
from quire_gateway.kube_api import KubeApi
from quire_gateway.llm_client import key_hash, parse
from quire_gateway.replicas import ReplicaTable
from quire_gateway.rollout import RolloutCounts
from quire_gateway.routing.by_load import RoundRobin
from quire_gateway.routing_state import RoutingState
from quire_gateway.status_writer import StatusWriter
from quire_gateway.usage_ledger import Spending, UsageLedger
from quire_gateway.usage_writer import UsageWriter
from tests.gateway.kube_stub import NAMESPACE, llm_object

PLACE = (NAMESPACE, "tiny")
DEMAND = f"quire-demand-{NAMESPACE}.tiny"


@pytest.fixture(autouse=True)
def _soon(monkeypatch, caplog):
    """What is tried again is tried at once."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(demand_writer, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(status_writer, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(usage_writer, "SAVE_SECONDS", 0.01)


@pytest.fixture
def api(kube, tmp_path):
    return KubeApi(kube.url, tmp_path)


@contextlib.asynccontextmanager
async def running(writer):
    task = asyncio.create_task(writer.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)  # between two looks at what a thread does


class Demands:
    """An activator that is asked for these models."""

    def __init__(self, *places):
        self.demanded, self.places = asyncio.Event(), list(places)

    def demands(self):
        return self.places


def leases(kube):
    return kube.objects.get("leases", {})


@pytest.mark.parametrize("status", [403, 410])
async def test_a_demand_that_is_refused_is_written_once_it_is_not(kube, api, caplog, status):
    kube.refusals[("PATCH", "leases")] = status
    async with running(DemandWriter(api, NAMESPACE, Demands(PLACE))):
        await until(lambda: "cannot ask for a pod of models/tiny" in caplog.text)
        kube.refusals.clear()
        await until(lambda: DEMAND in leases(kube))


async def test_a_demand_that_is_over_is_taken_back_as_soon_as_that_is_not_refused(kube, api, caplog):
    demands = Demands(PLACE)
    async with running(DemandWriter(api, NAMESPACE, demands)):
        await until(lambda: DEMAND in leases(kube))
        kube.refusals[("DELETE", "leases")] = 500
        demands.places = []
        await until(lambda: "cannot delete the Lease for models/tiny" in caplog.text)
        kube.refusals.clear()
        await until(lambda: DEMAND not in leases(kube))


async def test_a_demand_that_another_gateway_has_taken_back_is_no_failure(kube, api, caplog):
    demands = Demands(PLACE)
    writer = DemandWriter(api, NAMESPACE, demands)
    async with running(writer):
        await until(lambda: PLACE in writer._renewed_at)  # its answer is here, too
    kube.remove(DEMAND, "leases")
    await writer.close()
    assert not caplog.records


async def test_a_gateway_without_credentials_goes_on_to_ask_for_pods(tmp_path, caplog):
    async with running(DemandWriter(KubeApi("https://127.0.0.1:1", tmp_path), NAMESPACE, Demands(PLACE))):
        await until(lambda: caplog.text.count("cannot ask for pods of models that have none") > 1)


async def test_an_api_server_that_is_silent_does_not_keep_a_gateway_from_ending(kube, api, monkeypatch):
    monkeypatch.setattr(demand_writer, "_CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(status_writer, "_DELETE_SECONDS", 0.05)
    writer = DemandWriter(api, NAMESPACE, Demands(PLACE))
    async with running(writer):
        await until(lambda: PLACE in writer._renewed_at)  # its answer is here, too
    kube.refusals[("DELETE", "leases")] = None
    async with asyncio.timeout(30):
        await writer.close()
        await status_of(api, RoutingState()).close()
    assert DEMAND in leases(kube), "it expires by itself"


def status_of(api, state):
    """The writer of the only gateway that runs."""
    known = GatewayLeases(state.changed.set, time.monotonic)
    known.replace([lease("g", {}, "1")], NAMESPACE)
    replicas = ReplicaTable((NAMESPACE,), 8001, time.monotonic, lambda _: RoundRobin())
    return StatusWriter(api, (NAMESPACE, "g"), state, known, replicas, RolloutCounts())


def put(kube, state, kind, name, spec):
    kube.put(llm_object(kind, name, spec))
    {"LLMRoute": state.routes, "LLMClient": state.clients}[kind].put(kube.objects[f"{kind.lower()}s"][name])


def put_route(kube, state, name="r"):
    put(kube, state, "LLMRoute", name, {"models": ["chat"], "rules": [{"targets": [{"deployment": "tiny"}]}]})


def put_client(kube, state):
    put(kube, state, "LLMClient", "alice", {"keyHashes": [key_hash(b"Bearer sk-alice")]})


def stored(kube, plural, name):
    return kube.objects[plural][name].get("status") or {}


@pytest.mark.parametrize("status", [403, 410])
async def test_a_gateway_that_may_not_say_that_it_runs_says_so_once_it_may(kube, api, caplog, status):
    kube.refusals[("PATCH", "leases")] = status
    async with running(status_of(api, RoutingState())):
        await until(lambda: "cannot write the status" in caplog.text)
        kube.refusals.clear()
        await until(lambda: "g" in leases(kube))


async def test_a_gateway_says_again_and_again_that_it_runs(kube, api, monkeypatch):
    monkeypatch.setattr(status_writer, "RENEW_SECONDS", 0.01)
    async with running(status_of(api, RoutingState())):
        await until(lambda: "g" in leases(kube))
        first = leases(kube)["g"]["metadata"]["resourceVersion"]
        await until(lambda: leases(kube)["g"]["metadata"]["resourceVersion"] != first)


@pytest.mark.parametrize(("status", "is_said"), [(404, False), (422, True)])
async def test_a_status_that_is_refused_keeps_no_other_waiting(kube, api, caplog, status, is_said):
    """404: the object was deleted meanwhile."""
    state = RoutingState()
    put_route(kube, state)
    put_client(kube, state)
    kube.refusals[("PATCH", "llmroutes")] = status
    async with running(status_of(api, state)):
        await until(lambda: stored(kube, "llmclients", "alice"))
        await until(lambda: ("cannot write the status" in caplog.text) or not is_said)
        assert not stored(kube, "llmroutes", "r")


@pytest.mark.parametrize(("status", "is_said"), [(403, True), (409, False)])
async def test_an_event_that_is_refused_keeps_no_status_from_being_written(
    kube, api, caplog, status, is_said
):
    """409: another gateway has created it."""
    state = RoutingState()
    put_route(kube, state)
    put_route(kube, state, "same-name")
    kube.refusals[("POST", "events")] = status
    async with running(status_of(api, state)):
        await until(lambda: kube.refused)
        put_client(kube, state)
        await until(lambda: stored(kube, "llmclients", "alice"))
    assert stored(kube, "llmroutes", "r") and stored(kube, "llmroutes", "same-name")
    assert ("cannot create the Event" in caplog.text) is is_said


def used(state):
    """A ledger with a request of a client."""
    ledger = UsageLedger(state.clients.get, lambda: 1e9)
    client, spent = parse(state.clients.get((NAMESPACE, "alice"))), Spending(1, 2, 3)
    ledger.reserve(client, spent)
    ledger.settle(client, spent, spent)
    return ledger


async def test_usage_that_is_refused_is_saved_once_it_is_not(kube, api, caplog):
    state = RoutingState()
    put_client(kube, state)
    kube.refusals[("PATCH", "llmclients")] = 410
    async with running(UsageWriter(api, state, used(state))):
        await until(lambda: "cannot save what clients have used" in caplog.text)
        kube.refusals.clear()
        await until(lambda: stored(kube, "llmclients", "alice").get("usage", {}).get("requests") == 1)


async def test_a_gateway_that_ends_says_what_it_could_not_save(kube, api, caplog):
    state = RoutingState()
    put_client(kube, state)
    ledger = used(state)
    kube.refusals[("PATCH", "llmclients")] = 500
    await UsageWriter(api, state, ledger).close()
    assert "in the last seconds is not saved" in caplog.text


async def test_usage_of_a_client_that_was_deleted_is_no_failure(kube, api, caplog):
    state = RoutingState()
    put_client(kube, state)
    writer = UsageWriter(api, state, used(state))
    kube.refusals[("PATCH", "llmclients")] = 404
    async with api.connect() as connection:
        await writer._save_all(connection)
    assert not caplog.records
