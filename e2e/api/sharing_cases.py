"""Accepted and refused objects for the rules of `sharing`. Part of `cases`."""

from __future__ import annotations

from typing import Any

from e2e.api.specs import Body, minimal


def _shared(**fields: Any) -> Body:
    return minimal(sharing={"pool": "card"}, **fields)


# By rule: the arguments of `cases.Cases`.
SHARING_CASES: dict[str, dict[str, Any]] = {
    "spec#26": {
        "field": "spec.sharing",
        "accepted": (_shared(), _shared(replicas=1), _shared(replicas=0), minimal(replicas=2)),
        "refused": (
            _shared(replicas=2),
            _shared(autoscaling={"maxReplicas": 1}),
            _shared(autoscaling={"minReplicas": 0, "maxReplicas": 4}),
        ),
    },
    "spec#27": {
        "field": "spec.sharing",
        "accepted": (minimal(disaggregation={"prefill": {}}),),
        "refused": (_shared(disaggregation={"prefill": {}}),),
    },
    "spec#28": {
        "field": "spec.sharing",
        "accepted": (_shared(parallelism={"tensor": 2, "nodes": 1}),),
        "refused": (_shared(parallelism={"tensor": 2, "nodes": 2}),),
    },
    "spec#29": {
        "field": "spec.sharing",
        "accepted": tuple(_shared(rollout={"strategy": how}) for how in ("Auto", "Recreate")),
        "refused": tuple(_shared(rollout={"strategy": how}) for how in ("Surge", "InPlace")),
    },
    "spec#30": {
        "field": "spec.sharing",
        "accepted": (_shared(rollout={"autoRollback": False}), minimal(rollout={"autoRollback": True})),
        "refused": (_shared(rollout={"autoRollback": True}),),
    },
}
