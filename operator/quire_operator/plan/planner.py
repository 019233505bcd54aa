"""Decides which writes bring the cluster to the desired state: one function, from observed facts to the final
Plan.

Pure: `make_plan` sends no request, and in a settled cluster its Plan is empty, so a restart of the operator
writes nothing. Knows no status and no API server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from quire_operator import names
from quire_operator.observed import NEED_A_POD, WORKLOAD_KINDS, Body, Observed, Ref, is_ready, ref
from quire_operator.plan import (
    deletion_cost,
    disruption_budget,
    drift,
    golden_tokens,
    groups,
    handover,
    model_cache,
    replica_owner,
    revisions,
    scale_to_zero,
    sharing,
    strategy,
    take_over,
)
from quire_operator.plan.pacing import ApplyTimes, pace_repairs
from quire_operator.plan.plan import Plan, PodPatch
from quire_operator.plan.replica_owner import ReplicaOwner
from quire_operator.plan.revisions import Revision
from quire_operator.plan.take_over import FieldPath
from quire_operator.resources import Manifest, RenderedRevision
from quire_operator.spec import LLMDeployment

_LOST_NUMBER = "lost spec.replicas"
_AUTOSCALERS = ("HorizontalPodAutoscaler", "ScaledObject")


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """Everything that a plan follows from.

    `desired`: the children as rendered, those of the current revision included. `update_revision`: the
    revision of the current spec; None where revisions are not recorded (`kubectl quire plan`). `history`: the
    stored revisions. `rollback_reason`: why another revision than `update_revision` is applied.
    `rollout_failure`: why the rollout that is in progress cannot finish. `may_return_to`: the revision that a
    failure would roll back to, None where none would be. `corrupt_pods`: when each pod, by
    name, ended because of a corrupt model. `has_gateway`: which holds requests while no pod runs.
    `is_awake`: whether it has the accelerator that it shares, None where that is not known.
    `apply_times`: recent applies, for pacing; `monotonic_now` belongs
    to them.
    """

    model: LLMDeployment
    desired: tuple[Manifest, ...]
    observed: Observed
    now: datetime
    update_revision: RenderedRevision | None = None
    history: tuple[Revision, ...] = ()
    rollback_reason: str = ""
    rollout_failure: str = ""
    may_return_to: RenderedRevision | None = None
    corrupt_pods: Mapping[str, str] = field(default_factory=dict)
    has_gateway: bool = False
    is_awake: bool | None = None
    apply_times: ApplyTimes = field(default_factory=dict)
    monotonic_now: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """`desired`: the children as they are to be, with the strategy in effect. `rollback_reason`: why the last
    Ready revision is applied instead of the update revision; empty where it is not.
    `requeue_after`: seconds until the next reconcile is due, None where nothing was postponed.
    """

    plan: Plan
    desired: tuple[Manifest, ...]
    rollback_reason: str
    requeue_after: float | None
    apply_times: ApplyTimes


def make_plan(given: PlanInput) -> PlanResult:
    """The final Plan. Objects that others own are left alone."""
    model, observed = given.model, given.observed
    desired = sharing.with_replicas(given.desired, model, observed, given.is_awake)
    for role in model.roles:
        of_role = observed.in_role(role.role)
        desired = strategy.with_effective_strategy(desired, role, of_role, given.now)
        desired = disruption_budget.with_replicas_that_serve(desired, role, of_role, given.now)
    update = given.update_revision
    if update is not None:
        failed = revisions.mark_failed(model, update.name, given.history, observed, given.rollout_failure)
        if failed is not None:  # only that; the next reconcile applies the revision to roll back to
            return PlanResult(
                plan=failed,
                desired=desired,
                rollback_reason=given.rollback_reason or given.rollout_failure,
                requeue_after=0.0,
                apply_times=given.apply_times,
            )
    desired = golden_tokens.with_golden_tokens(desired, model, observed)
    desired = groups.with_start_delay(desired, model, observed)
    children = _plan_children(desired, given)
    recorded = Plan() if update is None else revisions.record(model, update, given.history, observed)
    full = Plan(
        revision_patches=recorded.revision_patches,
        delete_first=children.delete_first,
        apply=(*recorded.apply, *children.apply),
        take_over=children.take_over,
        delete=(*children.delete, *recorded.delete),
        pod_patches=children.pod_patches,
        repairs=children.repairs,
        details=(*recorded.details, *children.details),
    )
    paced, apply_times, wait = pace_repairs(full, given.apply_times, given.monotonic_now)
    idles_in = scale_to_zero.idles_in(model, observed, given.now, has_gateway=given.has_gateway)
    due = [seconds for seconds in (wait, idles_in) if seconds is not None]
    return PlanResult(
        plan=paced,
        desired=desired,
        rollback_reason=given.rollback_reason,
        requeue_after=min(due, default=None),
        apply_times=apply_times,
    )


def _plan_children(desired: tuple[Manifest, ...], given: PlanInput) -> Plan:
    observed, wanted = given.observed, _wanted(desired, given)
    apply: list[Manifest] = []
    taken: dict[Ref, tuple[FieldPath, ...]] = {}
    repairs: list[Ref] = []
    details: list[str] = []
    blocked = model_cache.blocked_by_download(wanted.values(), observed)
    for target, manifest in wanted.items():
        if target in observed.foreign or target in blocked or _must_wait(target, observed):
            continue
        if groups.must_be_made_anew(manifest, observed.children.get(target)):
            continue
        why, to_take = _why_apply(manifest, observed.children.get(target))
        if why:
            apply.append(manifest)
            details.append(f"apply {target}: {why}")
            if to_take:
                taken[target] = to_take
            if why.startswith(("lost", "has")) and not (
                why == _LOST_NUMBER and _is_own_number(target, given)
            ):
                repairs.append(target)
    replaced = _replaced(wanted, observed)
    details += [f"delete {target}: its groups get another size" for target, _ in replaced]
    kept = wanted.keys() | model_cache.downloaded_by(given.may_return_to)
    unwanted = tuple(
        (target, str(live["metadata"]["uid"]))
        for target, live in sorted(observed.children.items())
        if target not in kept
        and not (_is_terminating(live) or _is_used(live, observed))
        and not handover.is_awaiting_successor(target, wanted.keys(), given.model, observed, given.now)
    )
    details += [f"delete {target}: not wanted any more" for target, _ in unwanted]
    pod_patches = tuple(_pod_patches(observed))
    details += [f"patch Pod {pod.name}: {_why_patched(pod)}" for pod in pod_patches]
    restarts = list(model_cache.restarted_downloads(wanted.values(), observed, given.corrupt_pods, given.now))
    details += [f"delete {target}: {why}" for target, _, why in restarts]
    return Plan(
        delete_first=tuple(pair for pair in unwanted if pair[0].kind in _AUTOSCALERS),
        apply=tuple(apply),
        take_over=taken,
        delete=(
            *(pair for pair in unwanted if pair[0].kind not in _AUTOSCALERS),
            *((target, uid) for target, uid, _ in restarts),
            *replaced,
        ),
        pod_patches=pod_patches,
        repairs=tuple(repairs),
        details=tuple(details),
    )


def _wanted(desired: tuple[Manifest, ...], given: PlanInput) -> dict[Ref, Manifest]:
    """The children that there should be, each with the fields that this operator owns."""
    owners = _replica_owners(given)
    return {
        ref(manifest): _to_apply(
            manifest, given.observed, owners.get(manifest["metadata"]["name"], ReplicaOwner.SPEC)
        )
        for manifest in desired
    }


def _replaced(wanted: Mapping[Ref, Manifest], observed: Observed) -> tuple[tuple[Ref, str], ...]:
    """Children that are deleted to be made anew, with their uids."""
    return tuple(
        (target, str(live["metadata"]["uid"]))
        for target, manifest in wanted.items()
        if (live := observed.children.get(target)) is not None
        and groups.must_be_made_anew(manifest, live)
        and not _is_terminating(live)
    )


def _replica_owners(given: PlanInput) -> dict[str, ReplicaOwner]:
    """Who decides the number of pods of each role, by the name of what runs them."""
    observed = given.observed
    is_idle = scale_to_zero.is_idle(given.model, observed, given.now, has_gateway=given.has_gateway)
    return {
        role.workload_name: replica_owner.find_replica_owner(
            role, observed.in_role(role.role), is_idle=is_idle
        )
        for role in given.model.roles
    }


def _is_own_number(target: Ref, given: PlanInput) -> bool:
    """Whether a number of pods that is not the wanted one is so because the operator stops or starts them for
    lack of requests.
    """
    if target.kind not in WORKLOAD_KINDS or not given.model.scales_to_zero:
        return False
    return _replica_owners(given).get(target.name) in (ReplicaOwner.IDLE, ReplicaOwner.HPA)


def _why_apply(manifest: Manifest, live: Body | None) -> tuple[str, tuple[FieldPath, ...]]:
    """Why the manifest has to be applied, empty when it does not, and what is to be taken over before."""
    why = drift.reason_to_apply(manifest, live)
    if live is None or _is_terminating(live) or manifest["kind"] == "Job":
        return why, ()
    to_take = tuple(take_over.in_the_way(manifest, live))
    if to_take and not why:
        why = f"has {', '.join(map(take_over.described, to_take[:3]))} of another manager"
    return why, to_take


def _to_apply(manifest: Body, observed: Observed, owner: ReplicaOwner) -> Manifest:
    """The manifest with its applied hash. Where another owner decides the number of replicas, that number is
    no part of the hash, or each decision of an autoscaler would look like a change of ours.
    """
    if manifest["kind"] not in WORKLOAD_KINDS or owner is ReplicaOwner.SPEC:
        return drift.with_applied_hash(manifest)
    live = observed.children.get(ref(manifest))
    hashed = drift.with_applied_hash(_without_replicas(dict(manifest)))
    annotations = hashed["metadata"]["annotations"]
    if owner is ReplicaOwner.IDLE and live is not None and drift.reason_to_apply(hashed, live) == "changed":
        owner = ReplicaOwner.HPA  # what was changed starts once, so that an error in it shows
    result = replica_owner.with_replicas(dict(manifest), owner, live)
    return {**result, "metadata": {**result["metadata"], "annotations": annotations}}


def _without_replicas(manifest: Manifest) -> Manifest:
    metadata = {k: v for k, v in manifest["metadata"].items() if k != "resourceVersion"}
    return {
        **manifest,
        "metadata": metadata,
        "spec": {k: v for k, v in manifest["spec"].items() if k != "replicas"},
    }


def _must_wait(target: Ref, observed: Observed) -> bool:
    """True for a kind that is not installed or may not be read; for our HorizontalPodAutoscaler while KEDA
    has not yet deleted the one it made, because with two on one Deployment Kubernetes stops both; and
    before the first pod for what needs one.
    """
    is_second = target.kind == "HorizontalPodAutoscaler" and observed.keda_autoscaler is not None
    is_new = target not in observed.children
    is_early = target.kind in NEED_A_POD and is_new and not _pods_beside(target, observed)
    return is_second or is_early or target.kind in observed.missing or target.kind in observed.forbidden


def _pods_beside(target: Ref, observed: Observed) -> tuple[Body, ...]:
    """The pods of the role that the object belongs to."""
    is_prefill = target.name == names.workload(observed.name, names.ROLE_PREFILL)
    return observed.in_role(names.ROLE_PREFILL if is_prefill else names.ROLE_LEADER).pods


def _is_terminating(live: Body) -> bool:
    return "deletionTimestamp" in live["metadata"]


def _is_used(live: Body, observed: Observed) -> bool:
    """A ConfigMap is kept while a ReplicaSet (for a rollback) or a pod refers to it and cannot start without
    it, a claim while pods use it.
    """
    target = ref(live)
    if target.kind == "PersistentVolumeClaim":
        return model_cache.is_claim_in_use(live, observed)
    if target.kind != "ConfigMap":
        return False
    specs = [rs["spec"]["template"]["spec"] for rs in observed.replica_sets]
    specs += [pod["spec"] for pod in (*observed.pods, *observed.workers)]
    return any(target.name in _config_maps(spec) for spec in specs)


def _config_maps(pod_spec: Body) -> set[str]:
    sources = [
        source.get("configMapRef") or {}
        for container in pod_spec.get("containers") or ()
        for source in container.get("envFrom") or ()
    ]
    volumes = [volume.get("configMap") or {} for volume in pod_spec.get("volumes") or ()]
    needed = [volume for volume in volumes if not volume.get("optional")]
    return {str(source.get("name")) for source in (*sources, *needed)}


def _pod_patches(observed: Observed) -> Iterator[PodPatch]:
    """Removes from ready pods the annotations that protect a loading pod from eviction, and sets deletion
    costs.
    """
    costs = {
        str(pod["metadata"]["uid"]): cost
        for role in (names.ROLE_LEADER, names.ROLE_PREFILL)
        for pod, cost in deletion_cost.costs(observed.in_role(role), _ready_pods(observed.in_role(role)))
    }
    for pod in _ready_pods(observed):
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        annotations = pod["metadata"].get("annotations") or {}
        changes: dict[str, str | None] = {
            key: None for key, value in names.PROTECT_WHILE_LOADING.items() if annotations.get(key) == value
        }
        if uid in costs:
            changes[names.ANNOTATION_DELETION_COST] = costs[uid]
        if changes:
            yield PodPatch(name=name, uid=uid, annotations=changes)


def _ready_pods(observed: Observed) -> Iterator[Body]:
    return (pod for pod in observed.pods if is_ready(pod) and not _is_terminating(pod))


def _why_patched(pod: PodPatch) -> str:
    if names.ANNOTATION_DELETION_COST not in pod.annotations:
        return "it is ready and may be evicted"
    cost = pod.annotations[names.ANNOTATION_DELETION_COST]
    return "no scale-down is expected any more" if cost is None else f"deletion cost {cost}"
