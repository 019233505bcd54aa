"""The API server and kubectl understand the discovery documents of the adapter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.metrics_adapter.cluster import API_SERVICES, VERSIONS, Cluster
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("adapter")]

METRICS = [
    "llm_gpu_utilization",
    "llm_kv_cache_utilization",
    "llm_prefill_queue_depth",
    "llm_queue_depth",
    "llm_running_requests",
]


def test_kubectl_discovers_all_resources_without_a_warning(cluster: Cluster) -> None:
    done = cluster.kubectl("api-resources", "--cached=false")

    assert (done.returncode, done.stderr) == (0, "")
    assert "llmdeployments" in done.stdout
    assert "custom.metrics.k8s.io/v1beta2" in cluster.kubectl("api-versions").stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_the_metrics_are_listed_in_legacy_and_aggregated_discovery(cluster: Cluster, version: str) -> None:
    legacy = cluster.world.client.request("GET", f"/apis/custom.metrics.k8s.io/{version}")
    assert sorted(r["name"].rpartition("/")[2] for r in legacy["resources"]) == METRICS

    (group,) = eventually("the aggregator has it", lambda: fresh_group(cluster))
    (found,) = [v for v in group["versions"] if v["version"] == version]
    (resource,) = found["resources"]
    assert resource["resource"] == "llmdeployments.serving.quire.dev"
    assert sorted(s["subresource"] for s in resource["subresources"]) == METRICS
    assert group["versions"][0]["version"] == "v1beta2"


def fresh_group(cluster: Cluster) -> list[dict[str, Any]]:
    """Our group in the API server's aggregated document, once none of its versions is stale."""
    accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    answer = cluster.world.client._http.get("/apis", headers={"Accept": accept})
    groups = [g for g in answer.json()["items"] if g["metadata"]["name"] == "custom.metrics.k8s.io"]
    is_fresh = groups and all(v.get("freshness") == "Current" for v in groups[0]["versions"])
    return groups if is_fresh else []


def test_the_api_server_logs_no_openapi_errors_about_the_adapter(cluster: Cluster) -> None:
    """It asks for OpenAPI documents as well; without any it asks for ever and logs each failure."""
    assert cluster.kubectl("get", "--raw", "/openapi/v2").returncode == 0
    cluster.world.client.request(  # makes it ask at once
        "PATCH",
        f"{API_SERVICES}/v1beta2.custom.metrics.k8s.io",
        {"metadata": {"annotations": {"touched": "yes"}}},
        "application/merge-patch+json",
    )
    log = cluster.server.directory / "kube-apiserver.log"
    eventually("it asked", lambda: "custom.metrics.k8s.io" in log.read_text())
    lines = [line for line in log.read_text().splitlines() if "custom.metrics.k8s.io" in line]

    assert [line for line in lines if "resource not found" in line] == []


def test_a_namespace_can_still_be_deleted(cluster: Cluster, namespace: str) -> None:
    """The controller asks for everything that could be in it: a group that fails keeps it for ever."""
    cluster.world.create("ConfigMap", namespace, {"metadata": {"name": "x"}})
    cluster.world.client.request("DELETE", f"/api/v1/namespaces/{namespace}")

    def is_gone() -> bool:
        done = cluster.kubectl("get", "namespace", namespace, "-o", "json", "--ignore-not-found")
        conditions = json.loads(done.stdout or "{}").get("status", {}).get("conditions", [])
        failed = [c for c in conditions if c["type"] == "NamespaceDeletionDiscoveryFailure"]
        assert not any(c["status"] == "True" for c in failed), failed
        return not done.stdout.strip()

    eventually("the namespace is gone", is_gone, poll=0.5)
