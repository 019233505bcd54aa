"""Accepted and refused objects for the rules of `model.source` and `cache`. Part of `cases`."""

from __future__ import annotations

from typing import Any

from e2e.api.specs import DOWNLOADED, MINIMAL, Body, merged

_HUB, _S3, _GCS, _OCI, *_SHARED = DOWNLOADED
_CACHE = {"mode": "None", "size": "20Gi"}


def _without(body: Body, field: str) -> Body:
    return {**body, "spec": {key: value for key, value in body["spec"].items() if key != field}}


def _cached(**cache: Any) -> Body:
    return {**_OCI, "spec": {**_OCI["spec"], "cache": {**_CACHE, **cache}}}


def _shared(**cache: Any) -> Body:
    return {**_OCI, "spec": {**_OCI["spec"], "cache": {"mode": "SharedPVC", **cache}}}


def _of_one_node(**spec: Any) -> Body:
    return merged(_shared(size="20Gi", accessMode="ReadWriteOnce"), {"spec": spec})


def _hub(**fields: Any) -> Body:
    return merged(_HUB, {"spec": {"model": {"source": {"huggingFace": fields}}}})


def _s3(**fields: Any) -> Body:
    return merged(_S3, {"spec": {"model": {"source": {"s3": fields}}}})


def _env(name: str) -> Body:
    return _cached(download={"env": [{"name": name, "value": "x"}]})


# By rule: the arguments of `cases.Cases`.
SOURCE_CASES: dict[str, dict[str, Any]] = {
    "spec.model.source#0": {
        "field": "spec.model.source",
        "accepted": (MINIMAL, *DOWNLOADED),
        "refused": (
            merged(_HUB, {"spec": {"model": {"source": _S3["spec"]["model"]["source"]}}}),
            merged(MINIMAL, {"spec": {"model": {"source": {"pvc": None}}}}),
        ),
    },
    "spec.model.source.huggingFace#0": {
        "field": "spec.model.source.huggingFace.endpoint",
        "accepted": (
            _HUB,
            _hub(endpoint="http://hub.example.com", tokenSecretRef=None),
            _hub(endpoint=None),
        ),
        "refused": (_hub(endpoint="http://hub.example.com"),),
    },
    "spec#10": {
        "field": "spec.model",
        "accepted": (
            _S3,
            _GCS,
            _s3(credentialsSecretRef=None, anonymous=True),
            merged(_s3(credentialsSecretRef=None), {"spec": {"security": {"identity": {"workload": "EKS"}}}}),
            merged(_HUB, {"spec": {"security": {"identity": {"workload": "GKE"}}}}),
        ),
        "refused": (
            _s3(credentialsSecretRef=None),
            _s3(anonymous=True),
            merged(_GCS, {"spec": {"security": {"identity": {"workload": "GKE"}}}}),
        ),
    },
    "spec.cache#0": {
        "field": "spec.cache",
        "accepted": (_cached(mode="PerReplica", storageClassName="fast"), _cached()),
        "refused": (_cached(storageClassName="fast"),),
    },
    "spec.cache#1": {
        "field": "spec.cache",
        "accepted": (_shared(size="20Gi", accessMode="ReadWriteMany"), _shared(existingClaim="models")),
        "refused": (
            _cached(accessMode="ReadWriteOnce"),
            _cached(mode="PerReplica", accessMode="ReadWriteMany"),
        ),
    },
    "spec.cache#2": {
        "field": "spec.cache",
        "accepted": (_shared(size="20Gi"), _shared(existingClaim="models", retainPolicy="Retain")),
        "refused": (
            _shared(),
            _shared(size="20Gi", existingClaim="models"),
            _shared(existingClaim="models", storageClassName="fast"),
        ),
    },
    "spec#9": {
        "field": "spec.cache",
        "accepted": (
            _of_one_node(),
            _of_one_node(replicas=1),
            _of_one_node(autoscaling={"maxReplicas": 1}),
            merged(_shared(size="20Gi"), {"spec": {"replicas": 4}}),
        ),
        "refused": (
            _of_one_node(replicas=2),
            _of_one_node(autoscaling={"maxReplicas": 2}),
            _of_one_node(disaggregation={"prefill": {}}),
        ),
    },
    "spec.cache.size#0": {
        "field": "spec.cache.size",
        "accepted": (_cached(size="1"), _cached(size="64Ti")),
        "refused": (_cached(size="0"), _cached(size="65Ti"), _cached(size="many")),
    },
    "spec.cache.download.env[].name#0": {
        "field": "spec.cache.download.env[0].name",
        "accepted": (_env("HTTPS_PROXY"), _env("AWS_CA_BUNDLE")),
        "refused": (_env("QUIRE_HOST"), _env("LD_PRELOAD"), _env("PYTHONPATH"), _env("QUIRE_FAULT")),
    },
    "spec#8": {
        "field": "spec.cache",
        "accepted": (MINIMAL, *DOWNLOADED),
        "refused": (_without(_HUB, "cache"), merged(MINIMAL, {"spec": {"cache": _CACHE}})),
    },
}
