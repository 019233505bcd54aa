"""The discovery documents of the API: versions, resources and verbs.

A mistake here affects the whole cluster: while the discovery of a group fails, no namespace can be deleted.
All documents are constants. The aggregator requests the aggregated form at /apis; the older forms are served
below it. Pure. Source: k8s.io/api/apidiscovery/{v2,v2beta1}, k8s.io/apimachinery/pkg/apis/meta/v1
(APIResourceList).
"""

from __future__ import annotations

from typing import Any

from quire_metrics_adapter.load_metrics import METRICS
from quire_operator import names

Document = dict[str, Any]

GROUP = "custom.metrics.k8s.io"
VERSIONS = ("v1beta2", "v1beta1")  # the preferred one first
RESOURCE = f"{names.PLURAL}.{names.GROUP}"
API_SERVICES = tuple(f"{version}.{GROUP}" for version in VERSIONS)

_VERBS = ["get"]  # no list and no delete, or the namespace controller would try to delete metrics
_KIND = "MetricValueList"
_AGGREGATED = "APIGroupDiscoveryList"
# There are no objects that need a schema, but without these documents the API server would retry and log
# errors.
_OPENAPI: dict[str, Document] = {
    "/openapi/v2": {
        "swagger": "2.0",
        "info": {"title": "quire-metrics-adapter", "version": "1"},
        "paths": {},
    },
    "/openapi/v3": {"paths": {}},
}


def document(path: str, accept: str) -> tuple[Document, str] | None:
    """The document at `path` and its content type, None where there is none."""
    if path == "/apis":
        for version in _aggregated_versions(accept):
            kind = f"application/json;g=apidiscovery.k8s.io;v={version};as={_AGGREGATED}"
            return _aggregated(version), kind
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group()]}, "application/json"
    if path == f"/apis/{GROUP}":
        return {"kind": "APIGroup", "apiVersion": "v1", **_group()}, "application/json"
    if path in _OPENAPI:
        return _OPENAPI[path], "application/json"
    for version in VERSIONS:
        if path == f"/apis/{GROUP}/{version}":
            return _resources(version), "application/json"
    return None


def _aggregated_versions(accept: str) -> list[str]:
    """The versions of aggregated discovery that the client accepts, in its order of preference."""
    found = []
    for wish in accept.split(","):
        parameters = {part.strip() for part in wish.split(";")[1:]}
        if {"g=apidiscovery.k8s.io", f"as={_AGGREGATED}"} <= parameters:
            found += [version for version in ("v2", "v2beta1") if f"v={version}" in parameters]
    return found


def _group() -> Document:
    versions = [{"groupVersion": f"{GROUP}/{version}", "version": version} for version in VERSIONS]
    return {"name": GROUP, "versions": versions, "preferredVersion": versions[0]}


def _resources(version: str) -> Document:
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{GROUP}/{version}",
        "resources": [
            {
                "name": f"{RESOURCE}/{metric}",
                "singularName": "",
                "namespaced": True,
                "kind": _KIND,
                "verbs": _VERBS,
            }
            for metric in METRICS
        ],
    }


def _aggregated(discovery_version: str) -> Document:
    return {
        "kind": _AGGREGATED,
        "apiVersion": f"apidiscovery.k8s.io/{discovery_version}",
        "metadata": {},
        "items": [
            {
                "metadata": {"name": GROUP, "creationTimestamp": None},
                "versions": [_aggregated_version(version) for version in VERSIONS],
            }
        ],
    }


def _aggregated_version(version: str) -> Document:
    """Metrics are subresources of a resource that does not exist itself, as in Kubernetes' own metrics
    API.
    """
    kind = {"group": "", "version": "", "kind": _KIND}
    metrics = [{"subresource": metric, "responseKind": kind, "verbs": _VERBS} for metric in METRICS]
    resource = {
        "resource": RESOURCE,
        "responseKind": {"group": "", "version": "", "kind": ""},
        "scope": "Namespaced",
        "singularResource": "",
        "verbs": [],
        "subresources": metrics,
    }
    return {"version": version, "resources": [resource], "freshness": "Current"}
