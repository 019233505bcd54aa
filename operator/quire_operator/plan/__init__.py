"""Which writes make the cluster what it should be: desired manifests x observed objects -> a frozen Plan.

Called by reconcile, carried out by `cluster.execute`. Pure: a plan is made without a request, and an empty
plan is the usual outcome, so that a restart of the operator writes nothing. Knows no status and no API
server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from quire_operator import names
from quire_operator.observed import Body, Observed, Ref, ref
from quire_operator.plan import deletion_cost, handover, model_cache
from quire_operator.plan.drift import lost_fields
from quire_operator.plan.handover import Decider, decider

__all__ = [
    "Decider",
    "Plan",
    "PodMark",
    "RevisionMark",
    "decider",
    "lost_fields",
    "make_plan",
    "stamped",
    "with_renewals",
]

Manifest = dict[str, Any]

_AUTOSCALERS = ("HorizontalPodAutoscaler", "ScaledObject")


@dataclass(frozen=True, kw_only=True)
class PodMark:
    """A pod that is ready and gets these annotations, or loses those that are None."""

    name: str
    uid: str
    annotations: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class RevisionMark:
    """A ControllerRevision that gets this number and these annotations, or loses those that are None."""

    name: str
    uid: str
    number: int
    annotations: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Writes in the order in which they are to be made. `details` says why, one line each, for the log."""

    revise: tuple[RevisionMark, ...] = ()
    # Autoscalers that go before anything is applied: they would undo the number that is.
    retire: tuple[tuple[Ref, str], ...] = ()
    apply: tuple[Manifest, ...] = ()
    delete: tuple[tuple[Ref, str], ...] = ()  # with the uid that must still be there
    mark: tuple[PodMark, ...] = ()
    repairs: tuple[Ref, ...] = ()  # those of `apply` that somebody else had changed or deleted
    details: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.revise or self.retire or self.apply or self.delete or self.mark)


def make_plan(desired: Iterable[Body], observed: Observed, by: Decider = Decider.SPEC) -> Plan:
    """What to write. Names that belong to somebody else are left alone. `by`: who decides about the number of
    pods, which stands in the manifest of the Deployment as the spec has it.
    """
    wanted = {ref(manifest): _settled(manifest, observed, by) for manifest in desired}
    apply: list[Manifest] = []
    repairs: list[Ref] = []
    details: list[str] = []
    awaits_model = model_cache.waiting(wanted.values(), observed)
    for target, manifest in wanted.items():
        if target in observed.foreign or target in awaits_model or _must_wait(target, observed):
            continue
        why = _why_apply(manifest, observed.children.get(target))
        if why:
            apply.append(manifest)
            details.append(f"apply {target}: {why}")
            if why.startswith("lost"):
                repairs.append(target)
    unwanted = tuple(
        (target, str(live["metadata"]["uid"]))
        for target, live in sorted(observed.children.items())
        if target not in wanted and not _is_going(live) and not _is_used(live, observed)
    )
    details += [f"delete {target}: not wanted any more" for target, _ in unwanted]
    mark = tuple(_marks(observed))
    details += [f"mark Pod {pod.name}: {_why_marked(pod)}" for pod in mark]
    return Plan(
        retire=tuple(pair for pair in unwanted if pair[0].kind in _AUTOSCALERS),
        apply=tuple(apply),
        delete=tuple(pair for pair in unwanted if pair[0].kind not in _AUTOSCALERS),
        mark=mark,
        repairs=tuple(repairs),
        details=tuple(details),
    )


def with_renewals(
    plan: Plan, desired: Iterable[Body], observed: Observed, corrupt: Mapping[str, str], now: datetime
) -> Plan:
    """`plan` with the downloads that begin again: what they replace is deleted. `corrupt`: when the pods of
    these names ended for a corrupt model.
    """
    jobs = [stamped(one) for one in desired if one["kind"] == "Job"]
    found = list(model_cache.renewals(jobs, observed, corrupt, now))
    return replace(
        plan,
        delete=(*plan.delete, *((target, uid) for target, uid, _ in found)),
        details=(*plan.details, *(f"delete {target}: {why}" for target, _, why in found)),
    )


def stamped(manifest: Body) -> Manifest:
    """The manifest with the hash of itself as an annotation."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    annotations = {
        **(manifest["metadata"].get("annotations") or {}),
        names.ANNOTATION_APPLIED_HASH: hashlib.sha256(text.encode()).hexdigest(),
    }
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}


def _settled(manifest: Body, observed: Observed, by: Decider) -> Manifest:
    """The manifest as it is to be applied. Where others decide about the number of pods it is no part of the
    hash, or each of their decisions would be a change of ours.
    """
    if manifest["kind"] != "Deployment" or by is Decider.SPEC:
        return stamped(manifest)
    result = handover.settled(dict(manifest), by, observed.children.get(ref(manifest)))
    hashed = stamped(_without_number(result))
    annotations = hashed["metadata"]["annotations"]
    return {**result, "metadata": {**result["metadata"], "annotations": annotations}}


def _without_number(manifest: Manifest) -> Manifest:
    metadata = {k: v for k, v in manifest["metadata"].items() if k != "resourceVersion"}
    return {
        **manifest,
        "metadata": metadata,
        "spec": {k: v for k, v in manifest["spec"].items() if k != "replicas"},
    }


def _why_apply(manifest: Manifest, live: Body | None) -> str:
    """Empty when nothing needs to be written."""
    if live is None:
        return "missing"
    if _is_going(live) or manifest["kind"] == "Job":
        return ""  # its deletion is an event that brings us back; a Job is replaced and never changed
    hashes = [
        (body["metadata"].get("annotations") or {}).get(names.ANNOTATION_APPLIED_HASH)
        for body in (manifest, live)
    ]
    if hashes[0] != hashes[1]:
        return "lost its hash" if not hashes[1] else "changed"
    lost = lost_fields(manifest, live)
    return f"lost {', '.join(lost[:3])}" if lost else ""


def _must_wait(target: Ref, observed: Observed) -> bool:
    """A kind that is not installed or may not be read; and our autoscaler, while KEDA has not taken back its
    own: Kubernetes would stop both.
    """
    is_second = target.kind == "HorizontalPodAutoscaler" and observed.made_by_keda is not None
    return is_second or target.kind in observed.missing or target.kind in observed.forbidden


def _is_going(live: Body) -> bool:
    return "deletionTimestamp" in live["metadata"]


def _is_used(live: Body, observed: Observed) -> bool:
    """A ConfigMap lives as long as a ReplicaSet (for a rollback) or a pod refers to it; a claim, while
    somebody serves from it.
    """
    target = ref(live)
    if target.kind == "PersistentVolumeClaim":
        return model_cache.is_served_from(live, observed)
    if target.kind != "ConfigMap":
        return False
    specs = [rs["spec"]["template"]["spec"] for rs in observed.replica_sets]
    specs += [pod["spec"] for pod in observed.pods]
    return any(target.name in _config_maps(spec) for spec in specs)


def _config_maps(pod_spec: Body) -> set[str]:
    sources = [
        source.get("configMapRef") or {}
        for container in pod_spec.get("containers") or ()
        for source in container.get("envFrom") or ()
    ]
    return {str(source.get("name")) for source in sources}


def _marks(observed: Observed) -> Iterator[PodMark]:
    """Ready pods lose what protects a loading one from being moved, and are told how soon they may go."""
    ready = [pod for pod in observed.pods if _is_ready(pod) and not _is_going(pod)]
    costs = {str(pod["metadata"]["uid"]): cost for pod, cost in deletion_cost.costs(observed, iter(ready))}
    for pod in ready:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        annotations = pod["metadata"].get("annotations") or {}
        changes: dict[str, str | None] = {
            key: None for key, value in names.PROTECT_WHILE_LOADING.items() if annotations.get(key) == value
        }
        if uid in costs:
            changes[names.ANNOTATION_DELETION_COST] = costs[uid]
        if changes:
            yield PodMark(name=name, uid=uid, annotations=changes)


def _why_marked(pod: PodMark) -> str:
    if names.ANNOTATION_DELETION_COST not in pod.annotations:
        return "it is ready, disruptions may move it"
    cost = pod.annotations[names.ANNOTATION_DELETION_COST]
    return "no pod is about to go any more" if cost is None else f"its deletion would cost {cost}"


def _is_ready(pod: Body) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
