"""Several replicas: one bundle, one of them killed, certificates renewed; an API of another adapter."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509

from e2e.cluster.pki import Authority, Identity
from e2e.metrics_adapter.cluster import VERSIONS, Cluster, path
from e2e.metrics_adapter.engines import says
from e2e.metrics_adapter.replica import HOST, AdapterReplica
from e2e.waiting import eventually

pytestmark = pytest.mark.api

Start = Callable[..., AdapterReplica]


def owners(bundle: bytes) -> list[str]:
    """The pods whose authorities are in the bundle."""
    unit = x509.NameOID.ORGANIZATIONAL_UNIT_NAME
    found = x509.load_pem_x509_certificates(bundle) if bundle else []
    return sorted(str(c.subject.get_attributes_for_oid(unit)[0].value) for c in found)


def test_one_of_two_replicas_continues_to_answer_when_the_other_is_killed(
    cluster: Cluster, adapter: AdapterReplica, namespace: str, start: Start
) -> None:
    cluster.engine(namespace, "chat", says(queue=6))
    cluster.wait_value(namespace, "chat", "6")
    other = start("adapter-b").wait_ready()
    for version in VERSIONS:
        assert {"adapter-a", "adapter-b"} <= set(owners(cluster.bundle(version)))
    cluster.service.backends = [other.https_port]
    try:
        eventually("the other one serves", lambda: _through(cluster, namespace, other))
        cluster.service.backends = [adapter.https_port, other.https_port]
        other.kill()
        seen: list[str] = []

        def twenty_in_a_row() -> bool:
            seen.append(cluster.value(namespace, "chat"))
            return len(seen) >= 20 and set(seen[-20:]) == {"6"}

        eventually("it goes on without the other one", twenty_in_a_row)
    finally:
        cluster.service.backends = [adapter.https_port]
    assert {value for value in seen if value.isdigit()} == {"6"}
    cluster.wait_available()


def _through(cluster: Cluster, namespace: str, replica: AdapterReplica) -> bool:
    """Whether an answer came from `replica`: the aggregator keeps its connections."""
    before = replica.metrics().get('quire_metrics_adapter_requests_total{code="200"}', 0)
    assert cluster.value(namespace, "chat") == "6"
    for version in VERSIONS:  # a changed APIService makes the aggregator connect anew
        patch = {"metadata": {"annotations": {"touched": str(time.monotonic())}}}
        cluster.world.client.request(
            "PATCH",
            f"/apis/apiregistration.k8s.io/v1/apiservices/{version}.custom.metrics.k8s.io",
            patch,
            "application/merge-patch+json",
        )
    return replica.metrics().get('quire_metrics_adapter_requests_total{code="200"}', 0) > before


def test_a_replica_exits_within_ten_seconds_of_sigterm(adapter: AdapterReplica, start: Start) -> None:
    replica = start("adapter-e").wait_ready()
    began = time.monotonic()
    replica.send(signal.SIGTERM)

    assert replica.wait(10) == 0, replica.tail()
    assert "Traceback" not in replica.tail()
    assert time.monotonic() - began < 10


def test_a_restarted_replica_replaces_its_authority_in_the_bundle(
    cluster: Cluster, adapter: AdapterReplica, start: Start
) -> None:
    start("adapter-r").wait_ready().kill()
    start("adapter-r").wait_ready()

    for version in VERSIONS:
        assert owners(cluster.bundle(version)).count("adapter-r") == 1
        assert owners(cluster.bundle(version)).count("adapter-a") == 1


def test_an_authority_that_was_removed_from_the_bundle_is_restored(
    cluster: Cluster, adapter: AdapterReplica
) -> None:
    cluster.world.client.request(
        "PATCH",
        "/apis/apiregistration.k8s.io/v1/apiservices/v1beta2.custom.metrics.k8s.io",
        {"spec": {"caBundle": None}},
        "application/merge-patch+json",
    )

    eventually("it is back", lambda: "adapter-a" in owners(cluster.bundle()), poll=0.5)
    cluster.wait_available()


def test_a_renewed_certificate_is_always_trusted_by_the_published_bundle(
    cluster: Cluster, adapter: AdapterReplica, start: Start
) -> None:
    """Of six seconds here, and of a day in life."""
    replica = start("adapter-c", QUIRE_ADAPTER_CERTIFICATE_SECONDS="6").wait_ready()

    def renewals() -> int:
        answer = replica.get(path("x", "y"), cluster.bundle())  # raises where the bundle does not hold
        assert answer.status_code == 401
        return int(replica.metrics()["quire_metrics_adapter_certificates_total"])

    first = renewals()
    eventually("it was renewed twice", lambda: renewals() >= first + 2, poll=0.1)
    assert owners(cluster.bundle()).count("adapter-c") <= 2
    assert "adapter-a" in owners(cluster.bundle())


def test_a_mounted_certificate_is_served_and_no_api_service_is_written(
    cluster: Cluster, adapter: AdapterReplica, start: Start, tmp_path: Path
) -> None:
    Authority(tmp_path).issue(Identity("tls", "cert-manager's", serves=(HOST,)))
    before = [cluster.api_service(version)["spec"]["service"] for version in VERSIONS]
    replica = start("adapter-t", QUIRE_ADAPTER_TLS_DIRECTORY=str(tmp_path)).wait_ready()

    assert replica.get("/apis", (tmp_path / "ca.crt").read_bytes()).status_code == 401
    assert [cluster.api_service(version)["spec"]["service"] for version in VERSIONS] == before
    assert "adapter-t" not in owners(cluster.bundle())


def test_api_services_of_another_adapter_are_left_alone(
    cluster: Cluster, adapter: AdapterReplica, start: Start
) -> None:
    before = [cluster.api_service(version)["spec"]["service"] for version in VERSIONS]
    stranger = start("stranger", QUIRE_ADAPTER_SERVICE="prometheus-adapter")

    assert stranger.wait(20) == 3
    assert "belongs to the Service quire-system/quire-metrics-adapter" in stranger.tail()
    assert "metricsAdapter.enabled=false" in stranger.tail()
    assert [cluster.api_service(version)["spec"]["service"] for version in VERSIONS] == before
    assert "stranger" not in owners(cluster.bundle())
