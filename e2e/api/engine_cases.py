"""Accepted and refused objects for the rules of `engine` that are about answers. Part of `cases`."""

from __future__ import annotations

from typing import Any

from e2e.api.specs import minimal

_KEY = {"keySecretRef": {"name": "marks", "key": "key"}}

# By rule: the arguments of `cases.Cases`.
ENGINE_CASES: dict[str, dict[str, Any]] = {
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
