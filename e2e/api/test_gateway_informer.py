"""The gateway's informer before a real API server, with the token and the rights of a ServiceAccount."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from e2e.api import service_account
from e2e.api.client import Client
from e2e.waiting import HANG_SECONDS
from quire_gateway import kube_api
from quire_gateway.informer import ENDPOINT_SLICES, Informer
from quire_gateway.kube_api import KubeApi
from quire_gateway.replicas import LABEL_MODEL, LABEL_SERVICE, ReplicaTable
from quire_gateway.routing.by_load import RoundRobin

pytestmark = pytest.mark.api

NAMESPACE = "default"
ACCOUNT = "quire-gateway"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


def endpoint_slice(name: str, *addresses: str, ready: bool = True) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {LABEL_MODEL: "real", LABEL_SERVICE: "real"}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {"ready": ready},
                "targetRef": {"kind": "Pod", "name": f"p-{address}", "uid": f"uid-{address}"},
            }
            for address in addresses
        ],
    }


@pytest.fixture(scope="module")
def account(api: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the token and the CA of a gateway that may watch slices."""
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    return service_account.mounted(api, NAMESPACE, ACCOUNT, [rule], tmp_path_factory.mktemp("account"))


@contextlib.asynccontextmanager
async def informed(api: Client, account: Path) -> AsyncIterator[ReplicaTable]:
    table = ReplicaTable((NAMESPACE,), 8001, time.monotonic, lambda _: RoundRobin())
    informer = Informer(KubeApi(api.url, account), ENDPOINT_SLICES, table, NAMESPACE)
    running = asyncio.ensure_future(informer.run())
    try:
        yield table
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def until(table: ReplicaTable, *addresses: str) -> None:
    """Wait until these are the replicas."""
    async with asyncio.timeout(HANG_SECONDS):
        while {one.endpoint.address for one in table.replicas()} != set(addresses):
            await asyncio.sleep(0.02)


async def test_slices_are_followed_over_watches_that_end_and_go_on(
    api: Client, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_api, "WATCH_SECONDS", 1)  # so that several are resumed
    api.request("POST", SLICES, endpoint_slice("a", "198.18.0.1"))
    async with informed(api, account) as table:
        await until(table, "198.18.0.1")
        for second in range(3):  # each at another place of a watch
            api.request("POST", SLICES, endpoint_slice(f"b{second}", f"198.18.1.{second}"))
            await asyncio.sleep(0.7)  # passes the end of a watch
        await until(table, "198.18.0.1", "198.18.1.0", "198.18.1.1", "198.18.1.2")
        api.request("PUT", f"{SLICES}/a", endpoint_slice("a", "198.18.0.1", ready=False))
        for second in range(3):
            api.request("DELETE", f"{SLICES}/b{second}")
        await until(table)
        assert [one.name for one in table.models()] == ["real"]


async def test_rights_that_are_missing_are_named(api: Client, account: Path) -> None:
    async with KubeApi(api.url, account).connect() as connection:
        with pytest.raises(kube_api.KubeError, match="403.*cannot list resource"):
            await connection.list("/api/v1/secrets", LABEL_MODEL)
