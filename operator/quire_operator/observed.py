"""What the cluster holds for one LLMDeployment at one moment, as plain dicts in one frozen value.

`cluster.observe` makes it; `plan` and `status` decide from it and from nothing else. Knows no API server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_operator import names
from quire_operator.reports import Sample

Body = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Ref:
    """Which object, inside the namespace of its LLMDeployment."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The LLMDeployment as it is stored, the objects it owns, and its pods."""

    body: Body
    children: Mapping[Ref, Body] = field(default_factory=dict)  # only what carries our owner uid
    foreign: tuple[Ref, ...] = ()  # names that we want and that somebody else has
    rivals: tuple[Body, ...] = ()  # autoscalers of our Deployment that somebody else made
    made_by_keda: Body | None = None  # the autoscaler that KEDA made of our own ScaledObject
    missing: frozenset[str] = frozenset()  # kinds that we want and that the cluster does not know
    replica_sets: tuple[Body, ...] = ()
    pods: tuple[Body, ...] = ()
    samples: Mapping[str, Sample] = field(default_factory=dict)  # pod uid -> what it says of itself
    mount_errors: Mapping[str, str] = field(default_factory=dict)  # pod uid -> why a volume does not mount

    @property
    def namespace(self) -> str:
        return str(self.body["metadata"]["namespace"])

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def status(self) -> Body:
        """The status as it was last written."""
        stored = self.body.get("status")
        return stored if isinstance(stored, dict) else {}

    def child(self, kind: str) -> Body | None:
        """The one child of `kind` that has the LLMDeployment's own name."""
        return self.children.get(Ref(kind, self.name))


def ref(body: Body) -> Ref:
    """The Ref of a manifest or of a live object."""
    return Ref(str(body["kind"]), str(body["metadata"]["name"]))


def scales_deployment(body: Body, name: str) -> bool:
    """Whether this is an autoscaler of the Deployment `name`."""
    if body["kind"] != "HorizontalPodAutoscaler":
        return False
    target = (body.get("spec") or {}).get("scaleTargetRef") or {}
    return (target.get("kind"), target.get("name")) == ("Deployment", name)


def is_made_by_keda(autoscaler: Body, name: str) -> bool:
    """Whether KEDA made it of our ScaledObject, whose labels it copies: nobody else's has ours."""
    metadata = autoscaler["metadata"]
    owners = [
        (o.get("kind"), o.get("name")) for o in metadata.get("ownerReferences") or () if o.get("controller")
    ]
    return owners == [("ScaledObject", name)] and (metadata.get("labels") or {}).get(names.LABEL_NAME) == name


def is_shrinking(autoscaler: Body) -> bool:
    """Whether it is about to take pods away: it asks for fewer, or its window or its pace holds it back."""
    spec, status = autoscaler.get("spec") or {}, autoscaler.get("status") or {}
    pace = (spec.get("behavior") or {}).get("scaleDown") or {}
    current = int(status.get("currentReplicas") or 0)
    if pace.get("selectPolicy") == "Disabled" or current <= int(spec.get("minReplicas") or 1):
        return False
    reasons = {c.get("reason") for c in status.get("conditions") or ()}
    asks_for_fewer = int(status.get("desiredReplicas") or current) < current
    return asks_for_fewer or bool(reasons & {"ScaleDownStabilized", "ScaleDownLimit"})


def claims_on_replicas(body: Body) -> list[dict[str, Any]]:
    """The managed fields in which somebody owns spec.replicas, without what else he owns."""
    owned: Body = {"f:spec": {"f:replicas": {}}}
    return [
        {**claim, "fieldsV1": owned}
        for claim in body["metadata"].get("managedFields") or ()
        if "f:replicas" in ((claim.get("fieldsV1") or {}).get("f:spec") or {})
    ]


def controller_uid(body: Body) -> str:
    """The uid of the object's controller, empty when it has none."""
    for owner in body["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner.get("uid", ""))
    return ""
