"""How many pods a node drain may evict, so that a replica without a place blocks no drain.

A PodDisruptionBudget counts wanted pods, also one that gets no node. It would use up `maxUnavailable` and
keep the last pod that serves on its node for ever. So each replica that has found no place is added to
`maxUnavailable`, except where its place may come back by itself: during a rollout, while another pod
terminates, and while nodes are cordoned, as they are while they are drained. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from quire_operator.observed import (
    SCHEDULING_GRACE_SECONDS,
    Observed,
    controller_uid,
    newest_replica_set,
    scheduler_message,
    seconds_since,
    unscheduled_since,
)
from quire_operator.resources import Manifest

_CORDONED = "node(s) were unschedulable"


def with_replicas_that_serve(
    desired: Iterable[Manifest], observed: Observed, now: datetime
) -> tuple[Manifest, ...]:
    """`desired` with the `maxUnavailable` that applies to the pods that serve."""
    spare = _without_place(observed, now)
    return tuple(_raised(one, spare) if one["kind"] == "PodDisruptionBudget" else one for one in desired)


def _without_place(observed: Observed, now: datetime) -> int:
    newest = newest_replica_set(observed.replica_sets)
    if newest is None or any(controller_uid(pod) != newest["metadata"]["uid"] for pod in observed.pods):
        return 0
    waiting = [
        pod
        for pod in observed.pods
        if seconds_since(unscheduled_since(pod), now) >= SCHEDULING_GRACE_SECONDS
        and _CORDONED not in scheduler_message(pod)
    ]
    terminating = sum("deletionTimestamp" in pod["metadata"] for pod in observed.pods)
    return max(0, len(waiting) - terminating)


def _raised(budget: Manifest, spare: int) -> Manifest:
    spec = budget["spec"]
    return {**budget, "spec": {**spec, "maxUnavailable": spec["maxUnavailable"] + spare}}
