"""The conditions of an LLMDeployment, as kubectl wait, kstatus (Flux) and Argo CD read them.

They are computed from facts that are already decided. All conditions are always written, except those that
apply only to some specs: ScalingActive and ActivatorReady (an autoscaler), ModelCached (a shared model),
FitsAccelerator (an accelerator), DrainFitsNotice (spot nodes), Routed (a Gateway), RanksAuthenticated (groups
of nodes), TransferDegraded and TransfersAuthenticated (prefill pods), AdaptersReady (adapters); and
ContextReduced, once a pod has loaded the model. Ready, Stalled and Available are about the pods that clients
talk to, the others about prefill pods too. Reconciling and Stalled are never True together. While Ready is
True, Stalled is False, and Reconciling is True only for replicas that get no pod or no node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_operator.status import reasons, rollout
from quire_operator.status.model_cache import DownloadState
from quire_operator.status.pods import Failure
from quire_operator.status.reasons import ConditionValue

Condition = dict[str, Any]
SURGE_UNSCHEDULABLE = "SurgeUnschedulable"
AWAITING_NODE = "AwaitingNode"
_IN_PLACE = (
    "so this rollout goes on in place, one replica after the other, with one ready replica fewer meanwhile."
)
_NOT_STALLED: ConditionValue = ("False", "Progressing", "Nothing needs a change of the spec.")


@dataclass(frozen=True, kw_only=True)
class RolloutState:
    """The Deployment's numbers, and whether they describe its newest spec."""

    wanted: int = 0
    needed: int = 0  # ready replicas without which the LLMDeployment is not Ready
    replicas: int = 0
    updated: int = 0
    ready: int = 0
    available: int = 0
    seen: bool = False  # the Deployment controller has observed the newest spec, but for the number of pods
    deadline_exceeded: bool = False
    paused: bool = False
    surge_blocked: str = ""  # the scheduler's message for an unschedulable surge pod
    surge_wait_seconds: int = 0
    in_place: bool = False  # the surge pod stayed unschedulable for surge_wait_seconds

    @property
    def complete(self) -> bool:
        """Every pod is of the newest revision, and enough of them are available."""
        return self.seen and self.replicas == self.updated and self.available >= self.needed


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the conditions follow from."""

    rollout: RolloutState
    suspended: bool
    loading: int
    pods: int
    unscheduled: Failure | None  # why a replica gets no node, or no pod
    failure: Failure | None  # the one that explains most
    problem: Failure | None  # of the operator: the spec is invalid, an object cannot be applied
    scaling: ConditionValue | None = None  # ScalingActive
    idle: bool = False  # scaled to zero by an autoscaler
    asleep: ConditionValue | None = None  # Ready, where another one has the accelerator that it shares
    activator: ConditionValue | None = None  # ActivatorReady
    fits: ConditionValue | None = None  # FitsAccelerator
    drain_fits: ConditionValue | None = None  # DrainFitsNotice
    routed: ConditionValue | None = None  # Routed
    authenticated: ConditionValue | None = None  # RanksAuthenticated
    transfers_authenticated: ConditionValue | None = None  # TransfersAuthenticated
    context: ConditionValue | None = None  # ContextReduced
    adapted: ConditionValue | None = None  # AdaptersReady
    too_small: Failure | None = None  # the context of the newest pods
    unplaced: int = 0  # how many of the pods have no node
    downloading: int = 0  # how many of the loading pods still download the model
    download: DownloadState | None = None  # of a shared claim
    prefill: RolloutState | None = None  # of the prefill pods; `rollout` is that of the others
    prefill_failure: Failure | None = None
    transfers: ConditionValue | None = None  # TransferDegraded


def build(facts: Facts, *, generation: int, old: Sequence[Any], now: str) -> list[Condition]:
    """All conditions; `lastTransitionTime` is kept where the status of a condition stays the same."""
    before = {c.get("type"): c for c in old if isinstance(c, Mapping)}
    ready = _ready(facts)
    stalled = _stalled(facts) if ready[0] == "False" else _NOT_STALLED
    decided = {
        "Ready": ready,
        "Reconciling": _reconciling(facts, ready, is_stalled=stalled[0] == "True"),
        "Stalled": stalled,
        "Available": _available(facts.rollout),
        "RolloutComplete": _rollout_complete(facts),
        "Scheduled": _scheduled(facts),
        "Degraded": _degraded(facts),
    }
    if facts.scaling is not None:
        decided["ScalingActive"] = facts.scaling
    if facts.activator is not None:
        decided["ActivatorReady"] = facts.activator
    if facts.fits is not None:
        decided["FitsAccelerator"] = facts.fits
    if facts.drain_fits is not None:
        decided["DrainFitsNotice"] = facts.drain_fits
    if facts.download is not None:
        decided["ModelCached"] = facts.download.condition
    if facts.routed is not None:
        decided["Routed"] = facts.routed
    if facts.authenticated is not None:
        decided["RanksAuthenticated"] = facts.authenticated
    if facts.transfers_authenticated is not None:
        decided["TransfersAuthenticated"] = facts.transfers_authenticated
    if facts.context is not None:
        decided["ContextReduced"] = facts.context
    if facts.adapted is not None:
        decided["AdaptersReady"] = facts.adapted
    if facts.transfers is not None:
        decided["TransferDegraded"] = facts.transfers
    conditions = []
    for kind, (status, reason, message) in decided.items():
        known = before.get(kind) or {}
        since = known.get("lastTransitionTime") if known.get("status") == status else None
        conditions.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "observedGeneration": generation,
                "lastTransitionTime": since or now,
            }
        )
    return conditions


def _ready(facts: Facts) -> ConditionValue:
    rollout = facts.rollout
    if facts.problem is not None:
        return "False", facts.problem.reason, _explain(facts.problem)
    if facts.suspended:
        return "False", "Suspended", "No pods run: spec.suspend is true or spec.replicas is 0."
    if facts.asleep is not None:
        return facts.asleep
    if facts.idle:
        return (
            "False",
            "Idle",
            "No pods run: there was no request for spec.autoscaling.idle.afterSeconds.",
        )
    if facts.too_small is not None:
        return "False", facts.too_small.reason, _explain(facts.too_small)
    count = f"{rollout.ready} of {rollout.wanted} replicas ready."
    if rollout.complete and rollout.ready >= rollout.needed:
        reason = "AllReplicasReady" if rollout.ready >= rollout.wanted else "MinimumReplicasReady"
        return "True", reason, count
    if facts.failure is not None:
        return "False", facts.failure.reason, _explain(facts.failure)
    if facts.download is not None and facts.download.awaited:
        _, reason, message = facts.download.condition
        return "False", reason, f"{count} {message}"
    if facts.loading and facts.downloading == facts.loading:
        return "False", "Downloading", f"{count} The model is downloaded; status.model says how far that is."
    if facts.loading:
        return "False", "Loading", f"{count} Pods are loading the model; status.model says how far they are."
    if rollout.paused:
        return "False", "RolloutPaused", f"{count} spec.rollout.paused is true."
    if rollout.replicas > rollout.updated or not rollout.seen:
        return "False", "RollingOut", f"{count} {rollout.updated} run the newest spec."
    return "False", "Pending", f"{count} Pods are being started."


def _stalled(facts: Facts) -> ConditionValue:
    """True only when no retry helps until the spec, the model or another owner's object changes."""
    if facts.problem is not None and reasons.REASONS[facts.problem.reason].final:
        return "True", facts.problem.reason, _explain(facts.problem)
    if facts.too_small is not None:
        return "True", facts.too_small.reason, _explain(facts.too_small)
    failure = facts.failure
    if failure is not None and rollout.is_final(failure):
        return "True", failure.reason, _explain(failure)
    if facts.rollout.deadline_exceeded:
        detail = f"{failure.reason}: {failure.detail}" if failure is not None else ""
        return "True", "ProgressDeadlineExceeded", reasons.message("ProgressDeadlineExceeded", detail)
    return _NOT_STALLED


def _reconciling(facts: Facts, ready: ConditionValue, *, is_stalled: bool) -> ConditionValue:
    if is_stalled or facts.suspended or facts.idle:
        return "False", "Settled", "Nothing is under way."
    if ready[0] != "True":
        return "True", *ready[1:]
    scheduled = _scheduled(facts)
    if scheduled[0] == "False":
        return "True", scheduled[1], f"{ready[2]} {scheduled[2]}"
    return "False", "Settled", "Nothing is under way."


def _available(rollout: RolloutState) -> ConditionValue:
    if rollout.ready:
        return "True", "Serving", f"{rollout.ready} pods answer requests."
    return "False", "NoReadyReplica", "No pod answers requests."


def _rollout_complete(facts: Facts) -> ConditionValue:
    rollout, of = facts.rollout, ""
    if rollout.complete and facts.prefill is not None and not facts.prefill.complete:
        rollout, of = facts.prefill, "prefill "
    if rollout.complete and facts.problem is None:
        return "True", "Complete", "All pods run the newest spec."
    count = f"{rollout.updated} of {rollout.wanted} {of}replicas run the newest spec."
    if rollout.paused:
        return "False", "Paused", count
    known = f" ({rollout.surge_blocked.rstrip('.')})" if rollout.surge_blocked else ""
    if rollout.in_place:
        return "False", SURGE_UNSCHEDULABLE, f"{count} An additional pod found no room{known}, {_IN_PLACE}"
    if rollout.surge_blocked:
        wait = f"After {rollout.surge_wait_seconds} seconds replicas are replaced in place instead."
        return "False", "WaitingToSurge", f"{count} An additional pod finds no room{known}. {wait}"
    return "False", "InProgress", count


def _scheduled(facts: Facts) -> ConditionValue:
    if facts.unscheduled is not None:
        failure = facts.unscheduled
        place = f"Pod {failure.pod} has no node." if failure.pod else "A pod could not be created."
        return "False", failure.reason, f"{place} {_explain(failure)}"
    if not facts.pods:
        return "Unknown", "NoPods", "There are no pods to place."
    if facts.unplaced:
        return "Unknown", AWAITING_NODE, f"{facts.unplaced} of {facts.pods} pods have no node yet."
    return "True", "AllPodsScheduled", "Every pod has a node."


def _degraded(facts: Facts) -> ConditionValue:
    failure = facts.problem or facts.failure or facts.prefill_failure
    if failure is None:
        return "False", "AsExpected", "No pod is failing."
    return "True", failure.reason, _explain(failure)


def _explain(failure: Failure) -> str:
    return reasons.message(failure.reason, failure.detail)
