"""The Plan: every write of one reconcile, as frozen values.

`planner` makes it, `cluster` executes it in the order of its fields. Knows neither why a write is needed nor
how it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire_operator.observed import Ref
from quire_operator.plan.take_over import FieldPath
from quire_operator.resources import Manifest


@dataclass(frozen=True, kw_only=True)
class PodPatch:
    """Annotations to set on a pod; None removes one."""

    name: str
    uid: str
    annotations: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class RevisionPatch:
    """The number and the annotations to set on a ControllerRevision; None removes an annotation."""

    name: str
    uid: str
    number: int
    annotations: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Writes in the order in which they are made. `details`: the reason of each, one line for the log."""

    revision_patches: tuple[RevisionPatch, ...] = ()
    # Autoscalers that are deleted before anything is applied: they would overwrite the number of replicas.
    delete_first: tuple[tuple[Ref, str], ...] = ()
    apply: tuple[Manifest, ...] = ()
    # Fields of those of `apply` that other managers own, and that are made ours first so that they go.
    take_over: Mapping[Ref, tuple[FieldPath, ...]] = field(default_factory=dict)
    delete: tuple[tuple[Ref, str], ...] = ()  # with the uid as a precondition
    pod_patches: tuple[PodPatch, ...] = ()
    repairs: tuple[Ref, ...] = ()  # those of `apply` that another client had changed or deleted
    details: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(
            self.revision_patches or self.delete_first or self.apply or self.delete or self.pod_patches
        )
