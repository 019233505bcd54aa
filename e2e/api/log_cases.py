"""Accepted and refused objects for the rules of `observability`. Part of `cases`."""

from __future__ import annotations

from typing import Any

from e2e.api.specs import Body, minimal


def _redacting(**fields: str) -> Body:
    logging = {"redactConfigMapRef": {"name": "redaction"}, **fields}
    return minimal(observability={"requestLogging": logging})


# By rule: the arguments of `cases.Cases`.
LOG_CASES: dict[str, dict[str, Any]] = {
    "spec.observability.requestLogging#0": {
        "field": "spec.observability.requestLogging.redactConfigMapRef",
        "accepted": (_redacting(mode="Content"), minimal(observability={"requestLogging": {"mode": "Off"}})),
        "refused": (_redacting(), _redacting(mode="Off"), _redacting(mode="Metadata")),
    },
}
