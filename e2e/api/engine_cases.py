"""Accepted and refused objects for the rules of `engine` about answers and clients. Part of `cases`."""

from __future__ import annotations

from typing import Any

from e2e.api.specs import PER_KEY, Body, minimal

_KEY = {"keySecretRef": {"name": "marks", "key": "key"}}
_KEYS = {"apiKeysSecretRef": {"name": "keys"}}
_PROFILE = {"profileRef": {"name": "a100"}}
_OF_CPUS: tuple[Body, ...] = (
    {"quantization": "Int8"},
    {"quantization": "Int4"},
    {"dtype": "Float32", "quantization": "None"},
)


def _role_on_gpu(**engine: Any) -> Body:
    role = {"resources": {"cpu": "1", "memory": "8Gi", "gpu": {}}}
    return minimal(disaggregation={"prefill": role, "decode": role}, engine=engine)


# By rule: the arguments of `cases.Cases`.
ENGINE_CASES: dict[str, dict[str, Any]] = {
    "spec#1": {
        "field": "spec.engine",
        "accepted": (
            minimal(engine={"maxQueuedTokens": 1}),
            *(minimal(engine={limit: 8}, security=_KEYS) for limit in PER_KEY),
        ),
        "refused": (
            *(minimal(engine={limit: 8}) for limit in PER_KEY),
            *(minimal(engine={limit: 8}, security={"serviceAccountName": "x"}) for limit in PER_KEY),
        ),
    },
    "spec#40": {
        "field": "spec.engine",
        "accepted": (
            *(minimal(engine=engine) for engine in _OF_CPUS),
            minimal(engine={"quantization": "None", "dtype": "BFloat16"}, resources={"gpu": {}}),
            minimal(engine={"maxNumSeqs": 8}, resources=_PROFILE),
            _role_on_gpu(quantization="Auto"),
        ),
        "refused": (
            *(minimal(engine=engine, resources={"gpu": {}}) for engine in _OF_CPUS),
            *(minimal(engine=engine, resources=_PROFILE) for engine in _OF_CPUS),
            _role_on_gpu(quantization="Int4"),
        ),
    },
    "spec.engine.chatTemplate#0": {
        "field": "spec.engine.chatTemplate",
        "accepted": (
            minimal(engine={"chatTemplate": {"configMapRef": {"name": "templates"}}}),
            minimal(engine={"chatTemplate": {"file": "chat_template_tools.jinja"}}),
        ),
        "refused": (
            minimal(engine={"chatTemplate": {}}),
            minimal(engine={"chatTemplate": {"file": "a.jinja", "configMapRef": {"name": "templates"}}}),
        ),
    },
    "spec.engine.watermark#0": {
        "field": "spec.engine.watermark.keySecretRef",
        "accepted": (
            minimal(engine={"watermark": {}}),
            minimal(engine={"watermark": {"mode": "Off"}}),
            minimal(engine={"watermark": {"mode": "Always", **_KEY}}),
        ),
        "refused": (
            minimal(engine={"watermark": {"mode": "Always"}}),
            minimal(engine={"watermark": {"mode": "OnRequest"}}),
        ),
    },
}
