"""Gateways before a real API server: what they apply, how soon, and what they say of it in status."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.api import gateway_kinds, service_account
from e2e.api.client import Client
from e2e.api.specs import Body, merged
from quire_gateway import informer
from quire_gateway.dispatch import Dispatcher
from quire_gateway.gateway_leases import GatewayLeases
from quire_gateway.informer import Informer
from quire_gateway.kube_api import KubeApi
from quire_gateway.llm_client import LLMClient
from quire_gateway.openai.calls import Call
from quire_gateway.replicas import ReplicaTable
from quire_gateway.rollout import Arm, RolloutCounts, current
from quire_gateway.routing.by_load import RoundRobin
from quire_gateway.routing_state import RoutingState
from quire_gateway.settings import Timeouts
from quire_gateway.status_writer import StatusWriter
from quire_gateway.usage_ledger import Spending, UsageLedger
from quire_gateway.usage_writer import UsageWriter
from quire_http.errors import ApiError

pytestmark = [pytest.mark.api, pytest.mark.timeout(300)]

NAMESPACE = "gateways"
ACCOUNT = "quire-gateway"
API = f"/apis/serving.quire.dev/v1alpha1/namespaces/{NAMESPACE}"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
#: All that a gateway may do, as docs/gateway-routes.md lists it.
RULES = [
    {
        "apiGroups": ["serving.quire.dev"],
        "resources": ["llmroutes", "llmclients", "llmexternalbackends", "llmdeployments"],
        "verbs": ["list", "watch"],
    },
    {
        "apiGroups": ["serving.quire.dev"],
        "resources": ["llmroutes/status", "llmclients/status", "llmexternalbackends/status"],
        "verbs": ["patch"],
    },
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["create", "patch", "list", "watch", "delete"],
    },
]


@pytest.fixture(scope="module")
def account(api: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the token and the CA of a gateway."""
    api.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    return service_account.mounted(api, NAMESPACE, ACCOUNT, RULES, tmp_path_factory.mktemp("account"))


class Gateway:
    """What a gateway watches, decides by and writes, without its HTTP server."""

    def __init__(self, api: Client, account: Path, name: str) -> None:
        kube = KubeApi(api.url, account)
        self.state = RoutingState()
        replicas = ReplicaTable((NAMESPACE,), 8001, time.monotonic, lambda _: RoundRobin())
        self.dispatcher = Dispatcher(replicas, self.state, Timeouts())
        leases = GatewayLeases(self.state.changed.set, time.monotonic)
        self.rollouts = RolloutCounts()
        self.writer = StatusWriter(kube, (NAMESPACE, name), self.state, leases, replicas, self.rollouts)
        stores: list[tuple[informer.Kind, informer.Store]] = [
            (informer.LEASES, leases),
            (informer.LLM_ROUTES, self.state.routes),
            (informer.LLM_CLIENTS, self.state.clients),
            (informer.LLM_EXTERNAL_BACKENDS, self.state.externals),
        ]
        self.ledger = UsageLedger(self.state.clients.get, time.time)
        self.usage = UsageWriter(kube, self.state, self.ledger)
        self.work = [Informer(kube, kind, store, NAMESPACE).run() for kind, store in stores]
        self.work.append(self.writer.run())

    def answer(self, key: str) -> str:
        """How a request with a key for the model `chat` ends."""
        try:
            client = self.dispatcher.client(f"Bearer {key}".encode())
            self.dispatcher.destination(Call("chat"), {}, client)
        except ApiError as error:
            return str(error.code)
        return "relayed"


@contextlib.asynccontextmanager
async def running(api: Client, account: Path, *names: str) -> AsyncIterator[list[Gateway]]:
    gateways = [Gateway(api, account, name) for name in names]
    tasks = [asyncio.ensure_future(one) for gateway in gateways for one in gateway.work]
    try:
        yield gateways
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(what: Callable[[], Any], expected: object, seconds: float = 120) -> float:
    """Wait until it is as expected; the seconds that this took."""
    begun = time.monotonic()
    while (found := await asyncio.to_thread(what)) != expected:
        assert time.monotonic() - begun < seconds, found
        await asyncio.sleep(0.01)
    return time.monotonic() - begun


def object_of(body: Body, name: str, **spec: Any) -> Body:
    metadata = {"name": name, "namespace": NAMESPACE}
    return merged({**body, "metadata": metadata}, {"spec": spec})


def edit(api: Client, plural: str, name: str, **spec: Any) -> None:
    api.request("PATCH", f"{API}/{plural}/{name}", {"spec": spec}, "application/merge-patch+json")


def status_of(api: Client, plural: str, name: str) -> dict[str, Any]:
    """Conditions by their type, the gateways, and whether all of it is about the spec of now."""
    body = api.request("GET", f"{API}/{plural}/{name}")
    found = {one["type"]: (one["status"], one["reason"]) for one in body["status"].get("conditions", ())}
    is_current = body["status"]["observedGeneration"] == body["metadata"]["generation"]
    return {**found, "gateways": body["status"].get("gateways"), "current": is_current}


async def test_a_kill_switch_and_a_revoked_key_hold_at_every_gateway_within_a_second_and_status_proves_it(
    api: Client, account: Path
) -> None:
    keys = [hashlib.sha256(key).hexdigest() for key in (b"sk-one", b"sk-two")]
    api.create(object_of(gateway_kinds.LEAST[0], "chat"))
    api.create(object_of(gateway_kinds.LEAST[1], "team", keyHashes=keys))
    async with running(api, account, "gateway-a", "gateway-b") as gateways:

        def answers(key: str) -> set[str]:
            return {gateway.answer(key) for gateway in gateways}

        await until(lambda: answers("sk-two"), {"relayed"})
        both = {"seen": 2, "applied": 2}
        await until(lambda: status_of(api, "llmclients", "team")["gateways"], both)

        edit(api, "llmclients", "team", keyHashes=keys[:1])
        assert await until(lambda: answers("sk-two"), {"invalid_api_key"}) <= 1
        assert answers("sk-one") == {"relayed"}
        edit(api, "llmroutes", "chat", killSwitch={"enabled": True})
        assert await until(lambda: answers("sk-one"), {"kill_switch"}) <= 1

        killed = {
            "Accepted": ("True", "Accepted"),
            "ResolvedRefs": ("False", "DeploymentNotFound"),
            "Ready": ("False", "KillSwitch"),
            "gateways": both,
            "current": True,
        }
        await until(lambda: status_of(api, "llmroutes", "chat"), killed)
        await until(lambda: status_of(api, "llmclients", "team")["current"], True)
        before = api.request("GET", f"{API}/llmroutes/chat")["metadata"]["resourceVersion"]
        await asyncio.sleep(6)  # more than a renewal of each Lease
        assert api.request("GET", f"{API}/llmroutes/chat")["metadata"]["resourceVersion"] == before

        await gateways[1].writer.close()
        await until(lambda: len(api.request("GET", LEASES)["items"]), 1)


async def test_all_gateways_route_by_one_step_of_a_rollout_and_what_one_of_them_sees_ends_it(
    api: Client, account: Path
) -> None:
    rolls = {
        "deployment": "newest",
        "steps": [{"weight": 40, "pauseSeconds": 3600}],
        "abortOn": {"errorPercent": 5, "minRequests": 10},
    }
    api.create(object_of(gateway_kinds.LEAST[0], "rolls", models=["rolls"], rollout=rolls))

    def rollout() -> tuple[object, ...]:
        body = api.request("GET", f"{API}/llmroutes/rolls")
        found = body["status"].get("rollout") or {}
        return found.get("phase"), found.get("currentWeight")

    async with running(api, account, "gateway-d", "gateway-e") as gateways:

        def weights() -> set[int]:
            routes = [gateway.state.table.routes.get("rolls") for gateway in gateways]
            return {int(one.rollout_status.get("currentWeight", -1)) if one else -1 for one in routes}

        await until(rollout, ("Progressing", 0))  # there is no such LLMDeployment
        for gateway in gateways:
            gateway.state.deployments.put(
                {"metadata": {"name": "newest", "namespace": NAMESPACE, "uid": "n"}, "spec": {}}
            )
        await until(rollout, ("Progressing", 40))
        await until(weights, {40})

        route = gateways[1].state.table.routes["rolls"]
        assert route.rollout is not None
        key, _ = current(route.rollout, route.rollout_status)
        for _ in range(10):
            gateways[1].rollouts.ended(Arm(route.uid, key, is_candidate=True), is_error=True, first_byte=None)
        await until(rollout, ("Aborted", 0))
        await until(weights, {0})
        assert status_of(api, "llmroutes", "rolls")["RolledOut"] == ("False", "Aborted")
        edit(api, "llmroutes", "rolls", rollout=None)
        await until(rollout, (None, None))


@pytest.mark.deep
async def test_of_two_routes_with_one_name_the_younger_one_says_that_it_is_not_accepted(
    api: Client, account: Path
) -> None:
    api.create(object_of(gateway_kinds.LEAST[0], "older", models=["shared"]))
    await asyncio.sleep(1.1)  # creation is known to the second
    api.create(object_of(gateway_kinds.LEAST[0], "a-younger", models=["shared", "other"]))

    def younger() -> object:
        return status_of(api, "llmroutes", "a-younger").get("Accepted")

    async with running(api, account, "gateway-c"):
        await until(younger, ("False", "NameConflict"))
        await until(lambda: status_of(api, "llmroutes", "older").get("Accepted"), ("True", "Accepted"))
        api.request("DELETE", f"{API}/llmroutes/older")
        await until(younger, ("True", "Accepted"))


async def test_what_gateways_count_and_save_at_the_same_time_adds_up_and_ends_the_budget_at_each(
    api: Client, account: Path
) -> None:
    keys = [hashlib.sha256(b"sk-spender").hexdigest()]
    api.create(
        object_of(gateway_kinds.CLIENT, "spender", keyHashes=keys, suspended=False, budget={"tokens": 1000})
    )
    most, took = Spending(1, 10, 100), Spending(1, 10, 10)

    def usage() -> dict[str, Any]:
        found: dict[str, Any] = api.request("GET", f"{API}/llmclients/spender")["status"].get("usage") or {}
        return found

    async with running(api, account, "gateway-d", "gateway-e", "gateway-f") as gateways:

        def clients() -> list[LLMClient]:
            tables = [gateway.state.table.clients for gateway in gateways]
            return [table[keys[0]] for table in tables if keys[0] in table]

        await until(lambda: len(clients()), 3)
        for _ in range(3):
            for gateway, client in zip(gateways, clients(), strict=True):
                gateway.ledger.reserve(client, most)
                gateway.ledger.settle(client, most, took)
            await asyncio.gather(*(gateway.usage.close() for gateway in gateways))
        assert (usage()["requests"], usage()["totalTokens"]) == (9, 180)

        def used() -> list[int]:
            return [one.ledger.spent(client).tokens for one, client in zip(gateways, clients(), strict=True)]

        await until(used, [180, 180, 180])
        whole = Spending(1, 820, 0)
        gateways[0].ledger.reserve(clients()[0], whole)
        gateways[0].ledger.settle(clients()[0], whole, whole)
        await gateways[0].usage.close()
        await until(used, [1000, 1000, 1000])
        for gateway, client in zip(gateways, clients(), strict=True):
            with pytest.raises(ApiError, match="1000 tokens and 250.00 a day"):
                gateway.ledger.reserve(client, Spending(1, 1, 0))
        await until(lambda: status_of(api, "llmclients", "spender").get("Ready"), ("False", "BudgetSpent"))
        assert usage()["totalTokens"] == 1000, "conditions were written, and the usage is still there"
