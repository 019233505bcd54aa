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
    forbidden: Mapping[str, str] = field(default_factory=dict)  # kinds that we want and may not read: why
    replica_sets: tuple[Body, ...] = ()
    pods: tuple[Body, ...] = ()
    fetchers: tuple[Body, ...] = ()  # pods of the Job that downloads the model
    samples: Mapping[str, Sample] = field(default_factory=dict)  # pod uid -> what it says of itself
    job_error: str = ""  # why the Job that downloads the model gets no pod
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


def workload(children: Iterable[Body], related: Sequence[Body]) -> tuple[list[Body], list[Body], list[Body]]:
    """Among the `related` objects the ReplicaSets of these children, the pods of those, and those of Jobs."""
    owners = {str(live["metadata"]["uid"]) for live in children}
    sets = [one for one in related if one["kind"] == "ReplicaSet" and controller_uid(one) in owners]
    makers = {str(one["metadata"]["uid"]) for one in sets}
    pods = [one for one in related if one["kind"] == "Pod"]
    served = [pod for pod in pods if controller_uid(pod) in makers]
    return sets, served, [pod for pod in pods if controller_uid(pod) in owners]


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
    """Since when there is no room for the pod, or no quota; empty unless that is what it lacks.

    Where no node is the right one, or a volume is missing, what another pod leaves would not help.
    """
    lacks_room = _scheduled(pod).get("reason") == "Unschedulable" and _ROOM.search(scheduler_says(pod))
    return unscheduled_since(pod) if lacks_room or is_held_by_kueue(pod) else ""


def unscheduled_since(pod: Body) -> str:
    """Since when the pod is known to have no node; empty for one that has. Where a gate holds it back the API
    server gives no time.
    """
    scheduled = _scheduled(pod)
    if scheduled.get("status") != "False":
        return ""
    return str(scheduled.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp") or "")


def scheduling_gates(pod: Body) -> list[str]:
    """Who holds the pod back from the scheduler."""
    return [str(gate.get("name")) for gate in (pod.get("spec") or {}).get("schedulingGates") or ()]


def is_held_by_kueue(pod: Body) -> bool:
    """Whether its queue has no quota for it."""
    return any(gate.startswith(names.KUEUE_GATES) for gate in scheduling_gates(pod))


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


def served_model(deployment: Body) -> tuple[str, str]:
    """The claim that holds the model of its pods, and the directory there; empty where it has none."""
    spec = ((deployment.get("spec") or {}).get("template") or {}).get("spec") or {}
    volumes = {one.get("name"): one for one in spec.get("volumes") or ()}
    claim = (volumes.get("model") or {}).get("persistentVolumeClaim") or {}
    servers = [one for one in spec.get("containers") or () if one.get("name") == names.CONTAINER]
    arguments = [*(servers[0].get("args") or ()), "", ""] if servers else ["", ""]
    return str(claim.get("claimName", "")), str(arguments[1])


def ended(job: Body) -> dict[str, Body]:
    """How a Job has ended, Complete or Failed, with its condition; empty while it has not."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return {
        str(c["type"]): c
        for c in conditions
        if c.get("status") == "True" and c.get("type") in ("Complete", "Failed")
    }


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
