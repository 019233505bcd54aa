"""Problems that prevent a write and are known before it: names that others own, rights that are missing.

What the API server refuses during execution is reported by reconcile. Pure.
"""

from __future__ import annotations

from quire_operator import names, reports
from quire_operator.observed import Observed, ref
from quire_operator.spec import LLMDeployment
from quire_operator.status.pods import Failure


def ownership_conflict(observed: Observed) -> Failure | None:
    """Objects with a name that we need and with another owner."""
    reported_elsewhere = {
        ref(rival) for rival in observed.foreign_autoscalers
    }  # as ConflictingAutoscaler, which blocks no pod
    foreign = [target for target in observed.foreign if target not in reported_elsewhere]
    if not foreign:
        return None
    taken = ", ".join(f"{target} in namespace {observed.namespace}" for target in foreign)
    return Failure(reason="OwnershipConflict", detail=taken)


def missing_workload(model: LLMDeployment, observed: Observed) -> Failure | None:
    """LeaderWorkerSet, where replicas are groups of pods and it is not installed."""
    if not model.is_grouped or names.GROUP_KIND not in observed.missing:
        return None
    return Failure(reason="MissingCRD", detail="spec.parallelism.nodes: LeaderWorkerSet")


def missing_rights(observed: Observed) -> Failure | None:
    """Kinds that the spec needs and that the operator may not read."""
    if not observed.forbidden:
        return None
    return Failure(reason="MissingRights", detail=reports.printable("; ".join(observed.forbidden.values())))
