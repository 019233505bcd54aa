"""The API server fails all requests, is down, or has compacted what the watches last saw."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from e2e.chaos.children import Body, children, pods
from e2e.chaos.conftest import CREATED, UPDATED, settled
from e2e.cluster.apiserver import ApiServer
from e2e.operator.process import OperatorProcess
from e2e.operator.proxy import Proxy
from e2e.operator.world import World
from e2e.waiting import eventually

pytestmark = pytest.mark.timeout(300)

OUTAGE_SECONDS = 65  # kopf gives up after 60 by default
Start = Callable[..., OperatorProcess]
Record = Callable[[str, object], None]
Steps = dict[str, dict[str, Body]]


@pytest.mark.deep
@pytest.mark.chaos(
    2, fault=f"every request answered with 503 for {OUTAGE_SECONDS} s", proof="answers counted"
)
def test_the_operator_survives_a_minute_of_503_responses(
    world: World, namespace: str, proxy: Proxy, start: Start, undisturbed: Steps, record_property: Record
) -> None:
    operator = start("refused", QUIRE_WATCH_NAMESPACES=namespace).wait_leading(world)
    before = prepared(world, namespace)

    proxy.refusal = 503
    proxy.cut()
    edit_meanwhile(world, namespace)
    stays_well(operator, OUTAGE_SECONDS)
    assert proxy.faults[503] > 10
    proxy.refusal = 0

    seconds = caught_up(world, namespace, undisturbed, operator)
    assert before <= pods(world, namespace, "m")
    record_property("measured", f"caught up in {seconds:.1f} s")


@pytest.mark.deep
@pytest.mark.chaos(
    2, fault=f"kube-apiserver killed, gone for {OUTAGE_SECONDS} s", proof="connections refused"
)
def test_the_operator_survives_a_minute_without_an_api_server(
    world: World,
    server: ApiServer,
    namespace: str,
    proxy: Proxy,
    start: Start,
    undisturbed: Steps,
    record_property: Record,
) -> None:
    operator = start("gone", QUIRE_WATCH_NAMESPACES=namespace).wait_leading(world)
    before = prepared(world, namespace)

    server.kill_api()
    stays_well(operator, OUTAGE_SECONDS)
    assert proxy.unreached > 10
    server.start_api()
    edit_meanwhile(world, namespace)

    seconds = caught_up(world, namespace, undisturbed, operator)
    assert before <= pods(world, namespace, "m")
    record_property("measured", f"caught up in {seconds:.1f} s")


@pytest.mark.deep
@pytest.mark.api
@pytest.mark.chaos(
    3,
    fault="410 Gone: kube-apiserver restarted and etcd compacted, with edits in the gap",
    proof="watches got 410",
)
def test_changes_made_before_watches_expire_with_410_are_reconciled(
    world: World,
    server: ApiServer,
    namespace: str,
    proxy: Proxy,
    start: Start,
    undisturbed: Steps,
    record_property: Record,
) -> None:
    operator = start("expired", QUIRE_WATCH_NAMESPACES=namespace).wait_leading(world)
    before = prepared(world, namespace)
    world.deploy(namespace, "leaves")
    settled(world, namespace, "leaves")

    proxy.away = True
    proxy.cut()
    edit_meanwhile(world, namespace)
    world.delete("LLMDeployment", namespace, "leaves")
    world.deploy(namespace, "new")
    server.kill_api()
    server.compact()
    server.start_api()
    proxy.away = False
    eventually("watches get 410", lambda: proxy.expired)

    seconds = caught_up(world, namespace, undisturbed, operator, within=5 + 4)  # 4: until all are reported
    settled(world, namespace, "new")
    assert world.get("Deployment", namespace, "leaves") is None
    assert before <= pods(world, namespace, "m")
    record_property("measured", f"{proxy.expired} watches; caught up in {seconds:.1f} s")


@pytest.mark.chaos(4, fault="an ERROR of code 500 in an open watch", proof="exit code 1")
def test_an_error_event_in_a_watch_ends_the_process_and_the_restarted_one_catches_up(
    world: World, namespace: str, proxy: Proxy, start: Start, undisturbed: Steps, record_property: Record
) -> None:
    operator = start("reported", QUIRE_WATCH_NAMESPACES=namespace).wait_leading(world)
    before = prepared(world, namespace)

    error = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500, "message": "a fault"}
    assert proxy.send_line("llmdeployments", json.dumps({"type": "ERROR", "object": error}).encode() + b"\n")
    began = time.monotonic()
    assert operator.wait(10) == 1
    edit_meanwhile(world, namespace)
    operator.start()

    caught_up(world, namespace, undisturbed, operator)
    seconds = time.monotonic() - began
    assert seconds <= 15, "gone and back"
    assert before <= pods(world, namespace, "m")
    record_property("measured", f"back and caught up in {seconds:.1f} s")


def prepared(world: World, namespace: str) -> set[str]:
    """One LLMDeployment with its pods; the uids of the pods."""
    world.deploy(namespace, "m", **CREATED)
    settled(world, namespace)
    return eventually("its pods", lambda: pods(world, namespace, "m"))


def edit_meanwhile(world: World, namespace: str) -> None:
    """Edits a spec, deletes a child, and changes another by hand."""
    world.patch("LLMDeployment", namespace, "m", {"spec": dict(UPDATED)})
    world.delete("Service", namespace, "m")
    world.patch("PodDisruptionBudget", namespace, "m", {"spec": {"maxUnavailable": 0}})


def stays_well(operator: OperatorProcess, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert operator.code is None, operator.tail()
        assert operator.ask("/healthz")[0] == 200
        time.sleep(1)


def caught_up(
    world: World, namespace: str, undisturbed: Steps, operator: OperatorProcess, *, within: float = 15
) -> float:
    """Seconds until everything is as in an undisturbed run."""
    began = time.monotonic()
    eventually(
        f"caught up\n{operator.tail()}",
        lambda: children(world, namespace, "m") == undisturbed["updated"],
        seconds=within,
    )
    assert operator.code is None
    return time.monotonic() - began
