"""Accepted and refused objects for the rules of `adapters`. Part of `cases`."""

from __future__ import annotations

from typing import Any

from e2e.api.specs import ADAPTED, Body, merged

_S3 = {"uri": "s3://adapters/sales"}
_CREDENTIALS = {"credentialsSecretRef": {"name": "store"}}


def _with(*adapters: Body, **spec: Any) -> Body:
    return merged(ADAPTED, {"spec": {"adapters": list(adapters), **spec}})


def _adapter(name: str = "support", **source: Any) -> Body:
    return {"name": name, "source": source or {"huggingFace": {"repo": "example/support"}}}


def _s3(**fields: Any) -> Body:
    return _adapter(s3={**_S3, **fields})


def _hub(**fields: Any) -> Body:
    return _adapter(huggingFace={"repo": "example/support", **fields})


_TOKEN = {"tokenSecretRef": {"name": "hub", "key": "token"}}
_EKS = {"identity": {"workload": "EKS"}}

# By rule: the arguments of `cases.Cases`.
ADAPTER_CASES: dict[str, dict[str, Any]] = {
    "object#1": {
        "field": "spec.adapters",
        "accepted": (ADAPTED, _with(_adapter("adapted"))),
        "refused": (
            _with(_adapter("adapted"), model={"servedName": ""}),
            _with(_adapter(), _adapter("adapted"), model={"servedName": None}),
        ),
    },
    "spec#37": {
        "field": "spec.adapters",
        "accepted": (
            _with(_adapter("Base"), _adapter("base-8b.1")),
            _with(_adapter(), model={"aliases": None}),
        ),
        "refused": (_with(_adapter("base")), _with(_adapter(), _adapter("base-8b"))),
    },
    "spec#38": {
        "field": "spec.adapters",
        "accepted": (
            _with(_adapter()),
            _with(_adapter(), engine={"adaptersPath": ""}),
            _with(engine={"adaptersPath": "adapters"}),
            merged(ADAPTED, {"spec": {"adapters": [], "engine": None}}),
        ),
        "refused": (
            _with(_adapter(), engine={"adaptersPath": "adapters"}),
            _with(_adapter(), engine={"maxAdapters": None, "maxAdapterRank": None}),
            _with(_adapter(), engine=None),
        ),
    },
    "spec#39": {
        "field": "spec.adapters",
        "accepted": (
            _with(_s3(**_CREDENTIALS)),
            _with(_s3(anonymous=True)),
            _with(_s3(), security=_EKS),
        ),
        "refused": (
            _with(_s3()),
            _with(_s3(**_CREDENTIALS, anonymous=True)),
            _with(_s3(**_CREDENTIALS), security=_EKS),
            _with(_adapter(gcs={"uri": "gs://adapters/legal"})),
        ),
    },
    "spec.adapters[].source#0": {
        "field": "spec.adapters[0].source",
        "accepted": (ADAPTED,),
        "refused": (
            _with({"name": "none", "source": {}}),
            _with(_adapter(pvc={"claimName": "adapters"}, huggingFace={"repo": "example/support"})),
        ),
    },
    "spec.adapters[].source.pvc.path#0": {
        "field": "spec.adapters[0].source.pvc.path",
        "accepted": (_with(_adapter(pvc={"claimName": "adapters", "path": "a/..b"})),),
        "refused": tuple(
            _with(_adapter(pvc={"claimName": "adapters", "path": path})) for path in ("/a", "..", "a/../../b")
        ),
    },
    "spec.adapters[].source.huggingFace#0": {
        "field": "spec.adapters[0].source.huggingFace.endpoint",
        "accepted": (_with(_hub(**_TOKEN)), _with(_hub(endpoint="http://hub.example.com"))),
        "refused": (_with(_hub(endpoint="http://hub.example.com", **_TOKEN)),),
    },
}
