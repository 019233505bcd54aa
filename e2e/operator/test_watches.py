"""Faults of the watches: they fall silent, the API server goes away, their credentials expire."""

from __future__ import annotations

import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from e2e.cluster.apiserver import ApiServer
from e2e.operator import rights
from e2e.operator.process import OperatorProcess
from e2e.operator.proxy import Proxy, proxied
from e2e.operator.world import OPERATOR_NAMESPACE, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(120)]

Start = Callable[..., OperatorProcess]


@pytest.fixture
def proxy(server: ApiServer) -> Iterator[Proxy]:
    with proxied(server) as proxy:
        yield proxy


@pytest.fixture
def start(proxy: Proxy, kubeconfig: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts an operator that reaches the API server only through the proxy."""
    started: list[OperatorProcess] = []
    config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
    config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config), encoding="utf-8")

    def start(name: str, credentials: Path = tmp_path / "kubeconfig", **environ: str) -> OperatorProcess:
        started.append(OperatorProcess(name, credentials, tmp_path, **environ).start())
        return started[-1]

    yield start
    proxy.away = False
    for process in started:
        process.stop()


@pytest.mark.deep
@pytest.mark.chaos(9, fault="events dropped: a watch delivers no events any more", proof="events swallowed")
def test_a_watch_without_events_fails_the_liveness_probe_while_resyncs_still_reconcile(
    world: World, namespace: str, proxy: Proxy, start: Start
) -> None:
    operator = start("stale", QUIRE_RESYNC_SECONDS="1").wait_leading(world)
    world.deploy(namespace, "heard")
    eventually("all children", lambda: world.has_children(namespace, "heard"))
    eventually("some re-lists", lambda: relists(operator, "ok") >= 3)
    assert operator.ask("/healthz") == (200, "ok\n")

    proxy.silent = frozenset({"llmdeployments"})
    world.deploy(namespace, "unheard")
    eventually("all children nevertheless", lambda: world.has_children(namespace, "unheard"))
    eventually("it is not well", lambda: operator.ask("/healthz")[0] == 500)

    assert "LLMDeployment" in operator.ask("/healthz")[1]
    assert "the watch of llmdeployments delivers no events any more" in operator.log.read_text()
    assert proxy.swallowed, "the fault took effect"
    stale = {
        name: on for name, on in operator.metrics().items() if name.startswith("quire_operator_watch_stale{")
    }
    assert [name for name, on in stale.items() if on] == ['quire_operator_watch_stale{kind="LLMDeployment"}']

    proxy.silent = frozenset()
    world.patch("LLMDeployment", namespace, "unheard", {"metadata": {"labels": {"seen": "yes"}}})
    eventually("it is well again", lambda: operator.ask("/healthz")[0] == 200)


def test_an_unavailable_api_server_does_not_make_a_watch_stale(
    world: World, namespace: str, proxy: Proxy, start: Start
) -> None:
    operator = start("away", QUIRE_RESYNC_SECONDS="1").wait_leading(world)
    world.deploy(namespace, "before")
    eventually("all children", lambda: world.has_children(namespace, "before"))

    proxy.away = True
    proxy.cut()
    world.deploy(namespace, "meanwhile")

    def has_failed_to_list() -> bool:
        assert operator.ask("/healthz")[0] == 200
        return relists(operator, "error") >= 4

    eventually("re-lists in vain", has_failed_to_list)
    proxy.away = False

    def has_caught_up() -> bool:
        assert operator.ask("/healthz")[0] == 200
        return world.has_children(namespace, "meanwhile")

    eventually("all children", has_caught_up)
    world.delete("Service", namespace, "before")
    eventually("the Service is back", lambda: world.get("Service", namespace, "before"))
    assert operator.code is None


@pytest.mark.deep
def test_an_expired_token_is_replaced_by_the_rotated_one_from_its_file(
    world: World, namespace: str, server: ApiServer, proxy: Proxy, start: Start, tmp_path: Path
) -> None:
    account = tmp_path / "account"
    account.mkdir()
    authority = server.directory / "pki" / "ca.crt"
    (account / "ca.crt").write_bytes(authority.read_bytes())
    old = bound_token(world, "old")
    (account / "token").write_text(old)
    operator = start(
        "rotated",
        credentials=account,
        KUBERNETES_SERVICE_HOST="127.0.0.1",
        KUBERNETES_SERVICE_PORT=str(proxy.port),
    ).wait_leading(world)
    world.deploy(namespace, "m")
    eventually("all children", lambda: world.has_children(namespace, "m"))

    (tmp_path / "token").write_text(bound_token(world, "new"))
    os.replace(tmp_path / "token", account / "token")
    world.client.request("DELETE", f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/secrets/old")
    eventually("the old token is worth nothing", lambda: status_with(old, server) == 401)
    assert proxy.answers[401] == 0
    proxy.cut()
    eventually("the watches are refused", lambda: proxy.answers[401])

    def is_mended() -> bool:
        service = world.read("Service", namespace, "m")
        return bool(service["spec"]["selector"]["serving.quire.dev/name"] == "m")

    for _ in range(2):  # by the watches: the next re-list is minutes away
        world.patch("Service", namespace, "m", {"spec": {"selector": {"serving.quire.dev/name": "else"}}})
        eventually("the selector is mended", is_mended)
    assert operator.code is None
    assert world.lease_holder() == operator.name


def relists(operator: OperatorProcess, result: str) -> float:
    return operator.metrics().get(f'quire_operator_resync_total{{result="{result}"}}', 0)


def bound_token(world: World, secret: str) -> str:
    """A token that expires when the Secret `secret` is deleted: no token can expire by itself within
    minutes.
    """
    path = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/secrets"
    made = world.client.request("POST", path, {"metadata": {"name": secret}})
    bound = {"apiVersion": "v1", "kind": "Secret", "name": secret, "uid": made["metadata"]["uid"]}
    return rights.token(world, "quire-operator", boundObjectRef=bound)


def status_with(token: str, server: ApiServer) -> int:
    """The HTTP status for the bearer of `token`."""
    request = urllib.request.Request(f"{server.url}/version", headers={"Authorization": f"Bearer {token}"})
    tls = ssl.create_default_context(cafile=str(server.directory / "pki" / "ca.crt"))
    try:
        with urllib.request.urlopen(request, context=tls, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
