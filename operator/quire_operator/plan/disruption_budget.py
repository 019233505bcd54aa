"""How many pods a node drain may evict, so that a replica without a place blocks no drain.

A PodDisruptionBudget counts wanted pods, also one that gets no node, or that a quota refuses. It would use up
`maxUnavailable` and keep the last pod that serves on its node for ever. So each replica that has found no
place is added to `maxUnavailable`, except where its place may come back by itself: during a rollout, while
another pod terminates, and while nodes are cordoned, as they are while they are drained. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from quire_operator.observed import (
    SCHEDULING_GRACE_SECONDS,
    Observed,
    Ref,
    newest_revision,
    old_pods,
    ref,
    replica_failure,
    scheduler_message,
    seconds_since,
    unscheduled_since,
)
from quire_operator.resources import Manifest
from quire_operator.spec import LLMDeployment

_CORDONED = "node(s) were unschedulable"
# Beside the time that an evicted pod counts in a quota, and as long again until its successor is tried.
_RETRY_MARGIN_SECONDS = 60


def with_replicas_that_serve(
    desired: Iterable[Manifest], model: LLMDeployment, observed: Observed, now: datetime
) -> tuple[Manifest, ...]:
    """`desired` with the `maxUnavailable` that applies to the pods that serve. `model` and `observed`: of one
    role.
    """
    spare = _without_place(observed, now) + _refused(model, observed, now)
    target = Ref("PodDisruptionBudget", model.workload_name)
    return tuple(_raised(one, spare) if ref(one) == target else one for one in desired)


def _without_place(observed: Observed, now: datetime) -> int:
    """Pods that have no node."""
    if not newest_revision(observed) or old_pods(observed):
        return 0
    waiting = [
        pod
        for pod in (*observed.pods, *observed.workers)
        if seconds_since(unscheduled_since(pod), now) >= SCHEDULING_GRACE_SECONDS
        and _CORDONED not in scheduler_message(pod)
    ]
    terminating = sum("deletionTimestamp" in pod["metadata"] for pod in observed.pods)
    return max(0, len(waiting) - terminating)


def _refused(model: LLMDeployment, observed: Observed, now: datetime) -> int:
    """Replicas whose pods cannot be created, and have not been for longer than the successor of an evicted
    pod may take.
    """
    deployment = observed.workload
    if deployment is None or old_pods(observed):
        return 0
    since = str(replica_failure(deployment).get("lastTransitionTime", ""))
    if seconds_since(since, now) < 2 * model.termination_grace_period_seconds + _RETRY_MARGIN_SECONDS:
        return 0
    return max(0, int((deployment.get("spec") or {}).get("replicas", 1)) - len(observed.pods))


def _raised(budget: Manifest, spare: int) -> Manifest:
    spec = budget["spec"]
    return {**budget, "spec": {**spec, "maxUnavailable": spec["maxUnavailable"] + spare}}
