"""Accepted and refused objects for the rules of `rollout`. Part of `cases`."""

from __future__ import annotations

from typing import Any

from e2e.api.specs import minimal

# By rule: the arguments of `cases.Cases`.
ROLLOUT_CASES: dict[str, dict[str, Any]] = {
    "spec.rollout#0": {
        "field": "spec.rollout",
        "accepted": (
            minimal(rollout={"maxSurge": 0, "maxUnavailable": 1}),
            minimal(rollout={"maxUnavailable": 0}),
        ),
        "refused": (
            minimal(rollout={"maxSurge": 0}),
            minimal(rollout={"maxSurge": 0, "maxUnavailable": 0}),
        ),
    },
    "spec.rollout#1": {
        "field": "spec.rollout.maxSurge",
        "accepted": (
            minimal(rollout={"strategy": "Surge"}),
            minimal(rollout={"strategy": "InPlace", "maxSurge": 0, "maxUnavailable": 1}),
        ),
        "refused": (minimal(rollout={"strategy": "Surge", "maxSurge": 0, "maxUnavailable": 1}),),
    },
}
