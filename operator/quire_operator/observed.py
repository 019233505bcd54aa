"""What the cluster holds for one LLMDeployment at one moment, as plain dicts in one frozen value.

`cluster.observe` makes it; `plan` and `status` decide from it and from nothing else. Knows no API server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from quire_operator import names
from quire_operator.reports import Sample

Body = Mapping[str, Any]

# What the scheduler says where another pod takes the room: resources, ports, or nearness.
_ROOM = re.compile(r"insufficient|too many pods|free ports|anti-affinity", re.IGNORECASE)


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


def is_ours(live: Body, uid: str) -> bool:
    """Owned by this very object; or an orphan that we made: somebody took its owner reference away."""
    controller = controller_uid(live)
    if controller:
        return controller == uid
    metadata = live["metadata"]
    made_by_us = names.ANNOTATION_APPLIED_HASH in (metadata.get("annotations") or {})
    return made_by_us and (metadata.get("labels") or {}).get(names.LABEL_MANAGED_BY) == names.MANAGED_BY


def workload(children: Iterable[Body], related: Sequence[Body]) -> tuple[list[Body], list[Body]]:
    """Among the `related` objects the ReplicaSets of these children, and the pods of those."""
    owners = {str(live["metadata"]["uid"]) for live in children}
    sets = [one for one in related if one["kind"] == "ReplicaSet" and controller_uid(one) in owners]
    makers = {str(one["metadata"]["uid"]) for one in sets}
    return sets, [one for one in related if one["kind"] == "Pod" and controller_uid(one) in makers]


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


def seconds_since(timestamp: str, now: datetime) -> float:
    """Seconds from a timestamp of the API server to `now`; 0 for what is no timestamp."""
    try:
        return (now - datetime.fromisoformat(timestamp)).total_seconds()
    except (ValueError, TypeError):
        return 0.0


def newest_of(replica_sets: Sequence[Body]) -> Body | None:
    """The ReplicaSet with the highest revision."""

    def revision(replica_set: Body) -> int:
        annotations = replica_set["metadata"].get("annotations") or {}
        text = annotations.get("deployment.kubernetes.io/revision", "0")
        return int(text) if text.isdigit() else 0

    return max(replica_sets, key=revision, default=None)


def surging_pods(observed: Observed) -> list[Body]:
    """Pods of the newest revision while older ones are there, going or not."""
    newest = newest_of(observed.replica_sets)
    uid = "" if newest is None else str(newest["metadata"]["uid"])
    current = [pod for pod in observed.pods if controller_uid(pod) == uid]
    return current if len(current) < len(observed.pods) else []


def awaits_room_since(pod: Body) -> str:
    """Since when the scheduler finds no room for the pod; empty unless room is what it lacks.

    Where no node is the right one, or a volume is missing, the room that another pod leaves would not help.
    """
    scheduled = _scheduled(pod)
    is_waiting = (scheduled.get("status"), scheduled.get("reason")) == ("False", "Unschedulable")
    return (
        str(scheduled.get("lastTransitionTime", ""))
        if is_waiting and _ROOM.search(scheduler_says(pod))
        else ""
    )


def scheduler_says(pod: Body) -> str:
    """Why the pod has no node, in the scheduler's words."""
    return str(_scheduled(pod).get("message", ""))


def _scheduled(pod: Body) -> Body:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c.get("type") == "PodScheduled"), {})


def is_replaced_in_place(deployment: Body) -> bool:
    """Whether its pods are replaced without one more than wanted."""
    strategy = (deployment.get("spec") or {}).get("strategy") or {}
    return (strategy.get("rollingUpdate") or {}).get("maxSurge") == 0


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
