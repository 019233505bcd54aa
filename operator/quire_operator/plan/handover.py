"""From a Deployment to groups of nodes and back: what serves is deleted once its successor serves.

One spec is of one of the two kinds, so a change of `parallelism.nodes` makes the other one, of the same name.
As in a rollout by surge the old one stays until all replicas of the new one are ready, also where the new
kind is not installed or is refused; where there is no room beside it, or the strategy is to replace pods in
place, until the new one exists. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from quire_operator.observed import (
    WORKLOAD_KINDS,
    Body,
    Observed,
    Ref,
    as_deployment,
    lacks_resources_since,
    seconds_since,
)
from quire_operator.spec import LLMDeployment


def is_awaiting_successor(
    target: Ref, wanted: Collection[Ref], model: LLMDeployment, observed: Observed, now: datetime
) -> bool:
    """Whether a workload that is not wanted any more has to go on."""
    others = [Ref(kind, target.name) for kind in WORKLOAD_KINDS - {target.kind}]
    if target.kind not in WORKLOAD_KINDS or others[0] not in wanted:
        return False
    live = observed.children.get(others[0])
    if live is None or "deletionTimestamp" in live["metadata"]:
        return True
    return not (_goes_in_place(model, live, observed, now) or _serves(live, observed))


def _serves(live: Body, observed: Observed) -> bool:
    """Whether all its replicas are ready."""
    successor = as_deployment(live, *observed.pods_of(live))
    status, metadata = successor.get("status") or {}, successor["metadata"]
    is_seen = int(status.get("observedGeneration") or 0) >= int(metadata.get("generation") or 0)
    replicas = int((successor.get("spec") or {}).get("replicas", 1))
    return is_seen and int(status.get("availableReplicas") or 0) >= replicas


def _goes_in_place(model: LLMDeployment, live: Body, observed: Observed, now: datetime) -> bool:
    """Whether the strategy is to free the room for new pods first, from the start or after a wait."""
    rollout = model.spec.rollout
    asked = ((observed.body.get("spec") or {}).get("rollout") or {}).get("strategy")  # groups know only one
    strategy = asked or "Auto"
    if strategy in ("InPlace", "Recreate") or not rollout.max_surge:
        return True
    if strategy != "Auto":
        return False
    leaders, workers = observed.pods_of(live)
    since = [lacks_resources_since(pod) for pod in (*leaders, *workers)]
    if not leaders:  # a quota may refuse them, which no object says
        since.append(str(live["metadata"].get("creationTimestamp", "")))
    return any(each and seconds_since(each, now) >= rollout.surge_wait_seconds for each in since)
