"""The history of renders: which one the spec stands for, which one is in force, what is written of it.

Called by reconcile with the ControllerRevisions of one LLMDeployment. The highest number is the render that
the spec stands for, unless another is due. Pure; what a revision keeps is read elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quire_operator import names
from quire_operator.observed import Body, Observed, Ref
from quire_operator.plan import Plan, RevisionMark, stamped
from quire_operator.resources import Kept, revision
from quire_operator.spec import LLMDeployment

HISTORY = 10


@dataclass(frozen=True, kw_only=True)
class Revision:
    """One that is stored. `failed`: why its rollout was given up."""

    name: str
    uid: str
    number: int
    rollback_to: str = ""
    failed: str = ""


def history(bodies: Iterable[Body]) -> tuple[Revision, ...]:
    """From the oldest to the newest."""
    return tuple(sorted((_read(body) for body in bodies), key=lambda one: (one.number, one.name)))


def rollback(model: LLMDeployment, asked: str, past: Sequence[Revision]) -> tuple[str, str]:
    """The revision that is in force instead of the one that is asked for, the last that was Ready, and why:
    its rollout has failed. Empty where there is none.
    """
    found = _find(asked, past)
    if found is None or not found.failed or not model.spec.rollout.auto_rollback:
        return "", ""
    return (found.rollback_to, found.failed) if _find(found.rollback_to, past) else ("", "")


def writes(
    plan: Plan, model: LLMDeployment, asked: Kept, past: Sequence[Revision], observed: Observed
) -> Plan:
    """`plan` with what is to be written of the history: the render that is `asked` for is the newest, and ten
    are kept.
    """
    newest = past[-1].number if past else 0
    known = _find(asked.name, past)
    if known is not None and known.number == newest:
        return plan
    ready = _last_ready(asked.name, past, observed)
    if known is None:
        manifest = stamped(revision.build(model, asked, number=newest + 1, rollback_to=ready))
        done = replace(plan, apply=(manifest, *plan.apply))
    else:
        annotations = {names.ANNOTATION_ROLLBACK_TO: ready or None, names.ANNOTATION_ROLLOUT_FAILED: None}
        mark = RevisionMark(name=known.name, uid=known.uid, number=newest + 1, annotations=annotations)
        done = replace(plan, revise=(mark,))
    others = [one for one in past if one.name not in (asked.name, ready)]
    spare = others[: max(0, len(others) + 1 + bool(ready) - HISTORY)]
    return replace(
        done,
        delete=(*done.delete, *((Ref("ControllerRevision", one.name), one.uid) for one in spare)),
        details=(f"keep {asked.name} as revision {newest + 1}", *done.details),
    )


def give_up(
    model: LLMDeployment, asked: str, past: Sequence[Revision], observed: Observed, why: str
) -> Plan | None:
    """What is written when the rollout has failed and there is something to go back to: only that it has.

    `why`: empty unless it failed. What was rolled out once is never left, whatever its pods do later.
    """
    found = _find(asked, past)
    if not why or not model.spec.rollout.auto_rollback or found is None or found.failed:
        return None
    if _find(found.rollback_to, past) is None or _running(observed) != asked or is_rolled_out(observed):
        return None
    annotations = {names.ANNOTATION_ROLLOUT_FAILED: why}
    mark = RevisionMark(name=found.name, uid=found.uid, number=found.number, annotations=annotations)
    return Plan(revise=(mark,), details=(f"give up {asked} ({why}), back to {found.rollback_to}",))


def is_unfinished(name: str, observed: Observed) -> bool:
    """Whether the Deployment was applied from this revision, and has never been rolled out."""
    return _running(observed) == name and not is_rolled_out(observed)


def is_rolled_out(observed: Observed) -> bool:
    """Whether all pods of the Deployment's template were available once; its controller remembers that."""
    deployment = observed.child("Deployment") or {}
    status = deployment.get("status") or {}
    reasons = {c["type"]: c.get("reason") for c in status.get("conditions") or ()}
    return (
        reasons.get("Progressing") == "NewReplicaSetAvailable"
        and int(status.get("observedGeneration") or 0) >= int(deployment["metadata"].get("generation") or 0)
        and status.get("updatedReplicas") == status.get("replicas")
    )


def _last_ready(asked: str, past: Sequence[Revision], observed: Observed) -> str:
    """The revision to come back to if `asked` fails; empty when none is known."""
    known = {one.name: one for one in past}
    running = _running(observed)
    if not past or running not in known:
        return ""
    found = running if is_rolled_out(observed) else past[-1].rollback_to
    if found == asked:
        found = known[asked].rollback_to
    return found if found in known else ""


def _running(observed: Observed) -> str:
    """Name of the revision that the Deployment was applied from."""
    metadata = (observed.child("Deployment") or {}).get("metadata") or {}
    return str((metadata.get("annotations") or {}).get(names.ANNOTATION_RENDER_REVISION, ""))


def _find(name: str, past: Sequence[Revision]) -> Revision | None:
    return next((one for one in past if one.name == name), None)


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
