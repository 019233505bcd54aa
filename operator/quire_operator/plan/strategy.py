"""The update strategy in effect: what `rollout.strategy: Auto` resolves to during a rollout.

Auto surges first. When the additional pod stays unschedulable for long enough, or a quota refuses it for as
long, the rest of the rollout is done in place, one pod at a time, each on the resources that an old pod
frees. The strategy in effect is read from the live Deployment, so that a restarted operator continues with
it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from quire_operator import names, quota
from quire_operator.observed import (
    Body,
    Observed,
    Ref,
    is_replaced_in_place,
    lacks_resources_since,
    ref,
    replica_failure,
    seconds_since,
    surge_pods,
)
from quire_operator.resources import Manifest
from quire_operator.spec import LLMDeployment


def with_effective_strategy(
    desired: Iterable[Manifest], model: LLMDeployment, observed: Observed, now: datetime
) -> tuple[Manifest, ...]:
    """`desired` with the strategy in effect in the Deployment's manifest. `model` and `observed`: of one
    role.
    """
    if not falls_back_to_in_place(model, observed, now):
        return tuple(desired)
    target = Ref("Deployment", model.workload_name)
    return tuple(_in_place(one, observed) if ref(one) == target else one for one in desired)


def _in_place(deployment: Manifest, observed: Observed) -> Manifest:
    """The Deployment with pods replaced in place. While a quota refuses one, an annotation has the number of
    pods: the Deployment controller copies it to the ReplicaSet, whose change makes the ReplicaSet controller
    try again as soon as an old pod has gone. By itself it waits as long again as it has been refused.
    """
    in_place = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    metadata = deployment["metadata"]
    if quota.is_exceeded(str(replica_failure(observed.workload).get("message", ""))):
        count = {names.ANNOTATION_REFUSED_BESIDE: str(len(observed.pods))}
        metadata = {**metadata, "annotations": {**metadata.get("annotations", {}), **count}}
    return {**deployment, "metadata": metadata, "spec": {**deployment["spec"], "strategy": in_place}}


def falls_back_to_in_place(model: LLMDeployment, observed: Observed, now: datetime) -> bool:
    """Whether Auto has stopped surging in the current rollout. It does not surge again before every pod is of
    the newest template and available.
    """
    rollout, deployment = model.spec.rollout, observed.workload
    if rollout.strategy != "Auto" or not rollout.max_surge or deployment is None:
        return False
    if _is_rollout_complete(deployment):
        return False
    if is_replaced_in_place(deployment):
        return True
    since = [lacks_resources_since(pod) for pod in surge_pods(observed)]
    since.append(str(quota.refused_surge(observed).get("lastTransitionTime", "")))
    return max(seconds_since(each, now) for each in since) >= rollout.surge_wait_seconds


def _is_rollout_complete(deployment: Body) -> bool:
    """Whether every pod is of the newest template and available."""
    status = deployment.get("status") or {}
    seen = int(status.get("observedGeneration") or 0) >= int(deployment["metadata"].get("generation") or 0)
    counts = {int(status.get(key) or 0) for key in ("replicas", "updatedReplicas", "availableReplicas")}
    return seen and counts == {int((deployment.get("spec") or {}).get("replicas", 1))}
