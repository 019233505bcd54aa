"""Discovery, values and refusals as the API server and its clients read them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from quire_metrics_adapter import discovery, queries, response_documents
from quire_metrics_adapter.errors import RefusedError
from quire_metrics_adapter.response_documents import Item

PREFIX = "/apis/custom.metrics.k8s.io/v1beta2/namespaces"
AGGREGATED = "application/json;g=apidiscovery.k8s.io;v={};as=APIGroupDiscoveryList"
METRIC_NAMES = {
    "llm_queue_depth",
    "llm_running_requests",
    "llm_kv_cache_utilization",
    "llm_gpu_utilization",
    "llm_prefill_queue_depth",
}


def document(path: str, accept: str = "application/json") -> dict[str, object]:
    found = discovery.document(path, accept)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_legacy_discovery_lists_every_metric_with_the_verb_get_only(version: str) -> None:
    listed = document(f"/apis/custom.metrics.k8s.io/{version}")

    assert listed["groupVersion"] == f"custom.metrics.k8s.io/{version}"
    names = {r["name"]: r for r in listed["resources"]}  # type: ignore[attr-defined]
    assert names.keys() == {f"llmdeployments.serving.quire.dev/{metric}" for metric in METRIC_NAMES}
    assert all(r["verbs"] == ["get"] and r["namespaced"] and r["kind"] for r in names.values())


@pytest.mark.parametrize("version", ["v2", "v2beta1"])
def test_aggregated_discovery_is_returned_when_accepted(version: str) -> None:
    found = discovery.document("/apis", AGGREGATED.format(version) + ",application/json")
    assert found is not None
    listed, content_type = found

    assert content_type == AGGREGATED.format(version)
    assert listed["apiVersion"] == f"apidiscovery.k8s.io/{version}"
    (group,) = listed["items"]
    assert [v["version"] for v in group["versions"]] == ["v1beta2", "v1beta1"]
    for one in group["versions"]:
        (resource,) = one["resources"]
        assert {s["subresource"] for s in resource["subresources"]} == METRIC_NAMES
        # Without a kind clients drop the subresource; with verbs the namespace controller would delete it.
        assert all(s["responseKind"]["kind"] for s in resource["subresources"])
        assert not resource["verbs"]


def test_the_first_supported_media_type_of_the_accept_header_is_returned() -> None:
    both = ",".join(AGGREGATED.format(version) for version in ("v2beta1", "v2"))

    assert document("/apis", both)["apiVersion"] == "apidiscovery.k8s.io/v2beta1"
    assert document("/apis")["kind"] == "APIGroupList"
    assert document("/apis", AGGREGATED.format("v9"))["kind"] == "APIGroupList"


def test_other_paths_have_no_discovery_document() -> None:
    assert discovery.document("/", "") is None
    assert discovery.document("/apis/custom.metrics.k8s.io/v1", "") is None
    assert discovery.document("/openapi/v4", "") is None
    assert discovery.document("/metrics", "") is None


def query(path: str, **parameters: str) -> queries.Query:
    return queries.parse(f"{PREFIX}{path}", parameters)


def test_a_path_is_parsed_for_one_object_and_for_all_objects() -> None:
    one = query("/team-a/llmdeployments.serving.quire.dev/chat/llm_queue_depth", labelSelector="a=b")
    every = query("/team-a/llmdeployments.serving.quire.dev/*/llm_queue_depth", labelSelector="a=b")

    assert (one.namespace, one.name, one.metric, one.label_selector) == (
        "team-a", "chat", "llm_queue_depth", "",
    )  # fmt: skip
    assert (every.name, every.label_selector) == ("*", "a=b")
    assert query("/team-a/llmdeployments.serving.quire.dev/%2A/llm_queue_depth") == query(
        "/team-a/llmdeployments.serving.quire.dev/*/llm_queue_depth"
    )


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("", 404),
        ("/team-a/pods/chat/llm_queue_depth", 404),
        ("/team-a/llmdeployments.serving.quire.dev/chat/llm_secrets", 404),
        ("/team-a/llmdeployments.serving.quire.dev/chat/llm_queue_depth/more", 404),
        ("/TEAM/llmdeployments.serving.quire.dev/chat/llm_queue_depth", 404),
        ("/*/llmdeployments.serving.quire.dev/chat/llm_queue_depth", 404),
        ("/..%2Fkube-system/llmdeployments.serving.quire.dev/chat/llm_queue_depth", 404),
        ("/team-a/llmdeployments.serving.quire.dev/..%2F..%2Fx/llm_queue_depth", 404),
        ("/team-a/llmdeployments.serving.quire.dev/chat%0a/llm_queue_depth", 404),
        ("/team-a/metrics/llm_queue_depth", 404),
    ],
)
def test_an_unknown_or_malformed_path_is_a_404(path: str, code: int) -> None:
    with pytest.raises(RefusedError) as refused:
        query(path)

    assert refused.value.code == code


def test_unsupported_or_oversized_selectors_are_a_400_that_names_them() -> None:
    place = "/team-a/llmdeployments.serving.quire.dev/chat/llm_queue_depth"
    with pytest.raises(RefusedError, match="metricLabelSelector") as refused:
        query(place, metricLabelSelector="model=x")
    assert refused.value.code == 400
    with pytest.raises(RefusedError, match="labelSelector"):
        query(place, labelSelector="x" * 5000)


ITEM = Item("team-a", "chat", 1.6, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))


def test_metric_values_have_the_format_of_each_api_version() -> None:
    described = {
        "kind": "LLMDeployment",
        "namespace": "team-a",
        "name": "chat",
        "apiVersion": "serving.quire.dev/v1alpha1",
    }
    shared = {"describedObject": described, "timestamp": "2026-01-02T03:04:05Z", "value": "1600m"}
    old = response_documents.metric_values("v1beta1", "llm_kv_cache_utilization", [ITEM])
    new = response_documents.metric_values("v1beta2", "llm_kv_cache_utilization", [ITEM])

    assert old["apiVersion"] == "custom.metrics.k8s.io/v1beta1"
    assert old["items"] == [{**shared, "metricName": "llm_kv_cache_utilization", "selector": None}]
    assert new["apiVersion"] == "custom.metrics.k8s.io/v1beta2"
    assert new["items"] == [{**shared, "metric": {"name": "llm_kv_cache_utilization", "selector": None}}]


def test_an_error_is_rendered_as_a_kubernetes_status() -> None:
    status = response_documents.status(RefusedError(503, "ServiceUnavailable", "not now"))

    assert (status["kind"], status["status"], status["code"]) == ("Status", "Failure", 503)
    assert (status["reason"], status["message"]) == ("ServiceUnavailable", "not now")
