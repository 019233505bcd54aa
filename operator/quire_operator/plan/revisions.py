"""The revision history of an LLMDeployment: recording revisions, rolling back, pruning.

A ControllerRevision stores what was rendered for a spec. The one with the highest number is the update
revision: what the spec stands for. Pure; the content of a stored revision is read elsewhere
(`resources.rendered_revision`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire_operator import names
from quire_operator.observed import Body, Observed, Ref
from quire_operator.plan.drift import with_applied_hash
from quire_operator.plan.plan import Plan, RevisionPatch
from quire_operator.resources import Manifest, RenderedRevision, controller_revision
from quire_operator.spec import LLMDeployment

HISTORY_LIMIT = 10


@dataclass(frozen=True, kw_only=True)
class Revision:
    """A stored ControllerRevision. `failed`: why its rollout was marked as failed."""

    name: str
    uid: str
    number: int
    rollback_to: str = ""
    failed: str = ""


def revision_history(bodies: Iterable[Body]) -> tuple[Revision, ...]:
    """Oldest first."""
    return tuple(sorted((_read(body) for body in bodies), key=lambda one: (one.number, one.name)))


def rollback_target(model: LLMDeployment, update: str, history: Sequence[Revision]) -> tuple[str, str]:
    """The revision to apply instead of `update`, whose rollout has failed (the last one that was Ready), and
    why it failed. Both empty where there is no rollback.
    """
    found = _find(update, history)
    if found is None or not found.failed or not model.spec.rollout.auto_rollback:
        return "", ""
    return (found.rollback_to, found.failed) if _find(found.rollback_to, history) else ("", "")


def may_return_to(model: LLMDeployment, update: str, history: Sequence[Revision], observed: Observed) -> str:
    """The revision to which a failed rollout of `update` would return. Empty once `update` was Ready, and
    where nothing is rolled back.
    """
    if not model.spec.rollout.auto_rollback or (
        _applied_revision(observed) == update and is_rolled_out(observed)
    ):
        return ""
    if history and history[-1].name == update:
        return history[-1].rollback_to
    return _last_ready(update, history, observed)


def record(
    model: LLMDeployment, update: RenderedRevision, history: Sequence[Revision], observed: Observed
) -> Plan:
    """The writes that make `update` the newest revision and prune the history to its limit."""
    newest = history[-1].number if history else 0
    known = _find(update.name, history)
    if known is not None and known.number == newest:
        return Plan()
    ready = _last_ready(update.name, history, observed)
    created: tuple[Manifest, ...] = ()
    patches: tuple[RevisionPatch, ...] = ()
    if known is None:
        manifest = controller_revision(model, update, number=newest + 1, rollback_to=ready)
        created = (with_applied_hash(manifest),)
    else:
        annotations = {names.ANNOTATION_ROLLBACK_TO: ready or None, names.ANNOTATION_ROLLOUT_FAILED: None}
        patch = RevisionPatch(name=known.name, uid=known.uid, number=newest + 1, annotations=annotations)
        patches = (patch,)
    others = [one for one in history if one.name not in (update.name, ready)]
    spare = others[: max(0, len(others) + 1 + bool(ready) - HISTORY_LIMIT)]
    return Plan(
        revision_patches=patches,
        apply=created,
        delete=tuple((Ref("ControllerRevision", one.name), one.uid) for one in spare),
        details=(f"record {update.name} as revision {newest + 1}",),
    )


def mark_failed(
    model: LLMDeployment, update: str, history: Sequence[Revision], observed: Observed, failure: str
) -> Plan | None:
    """The write that marks the rollout of `update` as failed; None unless it failed and there is a revision
    to roll back to.

    `failure`: why, empty unless it failed. A revision that was rolled out once is never rolled back, whatever
    happens to its pods later.
    """
    found = _find(update, history)
    if not failure or not model.spec.rollout.auto_rollback or found is None or found.failed:
        return None
    if (
        _find(found.rollback_to, history) is None
        or _applied_revision(observed) != update
        or is_rolled_out(observed)
    ):
        return None
    annotations = {names.ANNOTATION_ROLLOUT_FAILED: failure}
    patch = RevisionPatch(name=found.name, uid=found.uid, number=found.number, annotations=annotations)
    detail = f"mark {update} as failed ({failure}), roll back to {found.rollback_to}"
    return Plan(revision_patches=(patch,), details=(detail,))


def was_never_rolled_out(name: str, observed: Observed) -> bool:
    """Whether the Deployment was applied from this revision and its rollout has never completed."""
    return _applied_revision(observed) == name and not is_rolled_out(observed)


def is_rolled_out(observed: Observed) -> bool:
    """Whether all pods of the Deployment's template were available once: its condition Progressing records
    that.
    """
    deployment = observed.workload or {}
    status = deployment.get("status") or {}
    reasons = {c["type"]: c.get("reason") for c in status.get("conditions") or ()}
    return (
        reasons.get("Progressing") == "NewReplicaSetAvailable"
        and int(status.get("observedGeneration") or 0) >= int(deployment["metadata"].get("generation") or 0)
        and status.get("updatedReplicas") == status.get("replicas")
    )


def _last_ready(update: str, history: Sequence[Revision], observed: Observed) -> str:
    """The revision to roll back to if `update` fails; empty when none is known."""
    known = {one.name: one for one in history}
    applied = _applied_revision(observed)
    if not history or applied not in known:
        return ""
    found = applied if is_rolled_out(observed) else history[-1].rollback_to
    if found == update:
        found = known[update].rollback_to
    return found if found in known else ""


def _applied_revision(observed: Observed) -> str:
    """The revision that the Deployment was applied from."""
    metadata = (observed.workload or {}).get("metadata") or {}
    return str((metadata.get("annotations") or {}).get(names.ANNOTATION_RENDER_REVISION, ""))


def _find(name: str, history: Sequence[Revision]) -> Revision | None:
    return next((one for one in history if one.name == name), None)


def _read(body: Body) -> Revision:
    metadata = body["metadata"]
    annotations = metadata.get("annotations") or {}
    return Revision(
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        number=int(body.get("revision") or 0),
        rollback_to=str(annotations.get(names.ANNOTATION_ROLLBACK_TO, "")),
        failed=str(annotations.get(names.ANNOTATION_ROLLOUT_FAILED, "")),
    )
