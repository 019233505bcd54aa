"""The live objects of one LLMDeployment at one moment, as plain dicts in one frozen value, and what can be
read from them.

`cluster.observe` creates it; `plan` and `status` decide from it alone. Knows no API server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from quire_operator import names
from quire_operator.reports import GoldenTokens, Sample, parse_golden_tokens

Body = Mapping[str, Any]

# What the scheduler reports where another pod occupies what the pod needs: resources, ports, or
# anti-affinity.
# Kinds of which one runs the pods.
WORKLOAD_KINDS = frozenset({"Deployment", names.GROUP_KIND})
# Kinds that are applied with the first pod: Kubernetes records an Event, NoPods, for a budget without pods.
NEED_A_POD = frozenset({"PodDisruptionBudget"})
_LACKS_RESOURCES = re.compile(r"insufficient|too many pods|free ports|anti-affinity", re.IGNORECASE)
# How the scheduler ends its message: whether other pods hold what the pod needs, or no node has it at all.
_HELD_BY_PODS = "No preemption victims found"
_ON_NO_NODE = "Preemption is not helpful"
# Binding a claim or freeing a node takes a moment in a healthy cluster, too.
SCHEDULING_GRACE_SECONDS = 5.0


@dataclass(frozen=True, order=True)
class Ref:
    """An object in the namespace of its LLMDeployment."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The LLMDeployment as it is stored, the objects it owns, and its pods.

    `role`: of `child`; of `replica_sets`, `pods` and the autoscalers as well in what `in_role` returns.
    """

    body: Body
    role: str = names.ROLE_LEADER
    children: Mapping[Ref, Body] = field(default_factory=dict)  # those whose controller is the LLMDeployment
    foreign: tuple[Ref, ...] = ()  # objects with a name that we need and with another owner
    foreign_autoscalers: tuple[Body, ...] = ()  # autoscalers of our Deployment that others created
    keda_autoscaler: Body | None = None  # created by KEDA for our ScaledObject
    missing: frozenset[str] = frozenset()  # kinds that we need and that are not installed
    forbidden: Mapping[str, str] = field(
        default_factory=dict
    )  # kinds that we need and may not read: the error
    replica_sets: tuple[Body, ...] = ()
    pods: tuple[Body, ...] = ()  # those that serve: of a group the leader
    workers: tuple[Body, ...] = ()  # the other pods of groups
    download_pods: tuple[Body, ...] = ()  # pods of the Job that downloads the model
    samples: Mapping[str, Sample] = field(default_factory=dict)  # pod uid -> its last /statusz
    demanded_at: float = 0.0  # when a gateway last said that requests wait, in Unix time
    job_error: str = ""  # why the download Job gets no pod
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
        """The one child of `kind` that has the name of the role's Deployment."""
        return self.children.get(Ref(kind, names.workload(self.name, self.role)))

    def in_role(self, role: str) -> Observed:
        """The same with the workload of one role only. ReplicaSets belong to the Deployment that controls
        them, and all that have no other to the pods that clients talk to.
        """
        prefill = self.children.get(Ref("Deployment", names.workload(self.name, names.ROLE_PREFILL)))
        is_prefill = role == names.ROLE_PREFILL
        if prefill is None and not is_prefill:
            return self
        uid = "" if prefill is None else str(prefill["metadata"]["uid"])
        of_prefill = {
            str(one["metadata"]["uid"]) for one in self.replica_sets if uid and controller_uid(one) == uid
        }
        return replace(
            self,
            role=role,
            replica_sets=tuple(
                one for one in self.replica_sets if (str(one["metadata"]["uid"]) in of_prefill) is is_prefill
            ),
            pods=tuple(pod for pod in self.pods if (controller_uid(pod) in of_prefill) is is_prefill),
            foreign_autoscalers=() if is_prefill else self.foreign_autoscalers,
            keda_autoscaler=None if is_prefill else self.keda_autoscaler,
        )

    @property
    def workload(self) -> Body | None:
        """What runs the pods, in the terms of a Deployment: a Deployment, or the LeaderWorkerSet whose groups
        are the replicas. While one of them takes over from the other, the successor, with the numbers of
        both.
        """
        successor, before = self._workloads
        if successor is None:
            return before
        return successor if before is None else _with_predecessor(successor, before)

    @property
    def _workloads(self) -> tuple[Body | None, Body | None]:
        """That of the kind that the spec asks for, and that of the other kind."""
        found = [self.child(kind) for kind in _workload_kinds(self.body)]
        first, other = [None if one is None else as_deployment(one, *self.pods_of(one)) for one in found]
        return first, other

    def pods_of(self, workload: Body) -> tuple[tuple[Body, ...], tuple[Body, ...]]:
        """The role's pods that this Deployment or LeaderWorkerSet runs: those that serve, and workers."""
        is_grouped = workload.get("kind") == names.GROUP_KIND
        mine = tuple(pod for pod in self.pods if (group_index(pod) >= 0) is is_grouped)
        return mine, self.workers if is_grouped else ()


def _workload_kinds(body: Body) -> tuple[str, str]:
    """The kind that runs the pods of this spec, and the other one."""
    nodes = ((body.get("spec") or {}).get("parallelism") or {}).get("nodes") or 1
    return (names.GROUP_KIND, "Deployment") if nodes > 1 else ("Deployment", names.GROUP_KIND)


def _with_predecessor(successor: Body, before: Body) -> Body:
    """The successor, whose pods are the updated ones, with the numbers of both."""
    here, there = successor.get("status") or {}, before.get("status") or {}
    counted = ("replicas", "readyReplicas", "availableReplicas")
    sums = {key: int(here.get(key) or 0) + int(there.get(key) or 0) for key in counted}
    return {**successor, "status": {**here, **sums}}


def ref(body: Body) -> Ref:
    """The Ref of a manifest or of a live object."""
    return Ref(str(body["kind"]), str(body["metadata"]["name"]))


def is_owned(live: Body, uid: str) -> bool:
    """Whether the LLMDeployment `uid` owns the object, or the operator created it and its owner reference was
    removed.
    """
    controller = controller_uid(live)
    if controller:
        return controller == uid
    metadata = live["metadata"]
    made_by_us = names.ANNOTATION_APPLIED_HASH in (metadata.get("annotations") or {})
    return made_by_us and (metadata.get("labels") or {}).get(names.LABEL_MANAGED_BY) == names.MANAGED_BY


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The objects of an LLMDeployment that others make for it."""

    replica_sets: tuple[Body, ...]
    pods: tuple[Body, ...]
    workers: tuple[Body, ...]
    download_pods: tuple[Body, ...]


def find_workload(children: Sequence[Body], related: Sequence[Body]) -> Workload:
    """Among the `related` objects: the ReplicaSets of these children, the ReplicaSets' pods, those of the
    LeaderWorkerSet's groups, and the Jobs' pods.

    The pods of groups are made by StatefulSets, which are not read: their names, which LeaderWorkerSet gives,
    stand for them. The leader's is that of the set; the workers' that of their leader.
    """
    owners = {str(live["metadata"]["uid"]) for live in children}
    sets = [one for one in related if one["kind"] == "ReplicaSet" and controller_uid(one) in owners]
    makers = {str(one["metadata"]["uid"]) for one in sets}
    pods = [one for one in related if one["kind"] == "Pod"]
    served = [pod for pod in pods if controller_uid(pod) in makers]
    group_sets = {str(live["metadata"]["name"]) for live in children if live["kind"] == names.GROUP_KIND}
    leaders = [pod for pod in pods if stateful_set(pod) in group_sets]
    leader_names = {str(pod["metadata"]["name"]) for pod in leaders}
    return Workload(
        replica_sets=tuple(sets),
        pods=(*served, *leaders),
        workers=tuple(pod for pod in pods if stateful_set(pod) in leader_names),
        download_pods=tuple(pod for pod in pods if controller_uid(pod) in owners),
    )


def stateful_set(pod: Body) -> str:
    """The name of the StatefulSet that made the pod; empty for other pods."""
    for owner in pod["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == "StatefulSet":
            return str(owner.get("name", ""))
    return ""


def scales_workload(body: Body, name: str) -> bool:
    """Whether this is an autoscaler of the Deployment or LeaderWorkerSet `name`."""
    if body["kind"] != "HorizontalPodAutoscaler":
        return False
    target = (body.get("spec") or {}).get("scaleTargetRef") or {}
    return target.get("kind") in WORKLOAD_KINDS and target.get("name") == name


def is_keda_autoscaler(autoscaler: Body, name: str) -> bool:
    """Whether KEDA created it for our ScaledObject: KEDA copies the labels of the ScaledObject, so it has
    ours.
    """
    metadata = autoscaler["metadata"]
    owners = [
        (o.get("kind"), o.get("name")) for o in metadata.get("ownerReferences") or () if o.get("controller")
    ]
    return owners == [("ScaledObject", name)] and (metadata.get("labels") or {}).get(names.LABEL_NAME) == name


def golden_tokens(observed: Observed) -> tuple[GoldenTokens, ...]:
    """Those that are kept."""
    live = observed.children.get(Ref("ConfigMap", names.golden_tokens(observed.name))) or {}
    return parse_golden_tokens((live.get("data") or {}).get(names.GOLDEN_TOKENS_FILE))


def is_ready(pod: Body) -> bool:
    """Whether the kubelet says so."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def has_ended(pod: Body) -> bool:
    """Whether it runs no more, evicted for example. Its object stays, and a new one takes its place."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def is_about_to_scale_down(autoscaler: Body) -> bool:
    """Whether it is about to scale down: it wants fewer pods, or only its stabilization window or policy
    delays that.
    """
    spec, status = autoscaler.get("spec") or {}, autoscaler.get("status") or {}
    behavior = (spec.get("behavior") or {}).get("scaleDown") or {}
    current = int(status.get("currentReplicas") or 0)
    if behavior.get("selectPolicy") == "Disabled" or current <= int(spec.get("minReplicas") or 1):
        return False
    reasons = {c.get("reason") for c in status.get("conditions") or ()}
    wants_fewer = int(status.get("desiredReplicas") or current) < current
    return wants_fewer or bool(reasons & {"ScaleDownStabilized", "ScaleDownLimit"})


def may_scale_to_zero(body: Body) -> bool:
    """Whether the LLMDeployment may be without pods for lack of requests, or while another one has the
    accelerator.
    """
    spec = body.get("spec") or {}
    scaling = spec.get("autoscaling") or {}
    return scaling.get("minReplicas") == 0 or "idle" in scaling or bool(spec.get("sharing"))


def has_adapters(body: Body) -> bool:
    """Whether the LLMDeployment names LoRA adapters, which come and go in pods that are ready."""
    return bool((body.get("spec") or {}).get("adapters"))


def seconds_since(timestamp: str, now: datetime) -> float:
    """Seconds from a timestamp of the API server to `now`; 0 for an invalid one."""
    try:
        return (now - datetime.fromisoformat(timestamp)).total_seconds()
    except (ValueError, TypeError):
        return 0.0


def newest_replica_set(replica_sets: Sequence[Body]) -> Body | None:
    """The ReplicaSet with the highest revision."""

    def revision(replica_set: Body) -> int:
        annotations = replica_set["metadata"].get("annotations") or {}
        text = annotations.get("deployment.kubernetes.io/revision", "0")
        return int(text) if text.isdigit() else 0

    return max(replica_sets, key=revision, default=None)


def surge_pods(observed: Observed) -> list[Body]:
    """Pods of the newest revision while there are older ones, terminating or not."""
    newest = newest_revision(observed)
    current = [pod for pod in observed.pods if revision_of(pod) == newest]
    return current if len(current) < len(observed.pods) else []


def old_pods(observed: Observed) -> list[Body]:
    """Pods of earlier revisions, terminating or not."""
    newest = newest_revision(observed)
    return [pod for pod in observed.pods if revision_of(pod) != newest]


def newest_revision(observed: Observed) -> str:
    """What `revision_of` says of the newest pods; empty where none is known."""
    kinds = _workload_kinds(observed.body)
    newest = next((found for kind in kinds if (found := observed.child(kind)) is not None), None)
    if newest is not None and newest.get("kind") == names.GROUP_KIND:
        return _template_hash(pod_template(newest))
    replica_set = newest_replica_set(observed.replica_sets)
    return "" if replica_set is None else str(replica_set["metadata"]["uid"])


def revision_of(pod: Body) -> str:
    """The uid of the pod's ReplicaSet; of a pod of a group, the hash of its group's templates."""
    return _template_hash(pod) or controller_uid(pod)


def _template_hash(body: Body) -> str:
    annotations = (body.get("metadata") or {}).get("annotations") or {}
    return str(annotations.get(names.ANNOTATION_TEMPLATE_HASH, ""))


def group_index(pod: Body) -> int:
    """Which group of its LeaderWorkerSet the pod belongs to; -1 for other pods."""
    text = str((pod["metadata"].get("labels") or {}).get(names.LABEL_GROUP_INDEX, ""))
    return int(text) if text.isdecimal() else -1


def group_size(group_set: Body) -> int:
    """How many pods a group has."""
    return int((group_set["spec"].get("leaderWorkerTemplate") or {}).get("size", 1))


def as_deployment(workload: Body, leaders: Sequence[Body] = (), workers: Sequence[Body] = ()) -> Body:
    """A Deployment as it is, a LeaderWorkerSet in the terms of a Deployment.

    The numbers follow from the pods, which are watched: LeaderWorkerSet's own status comes later, and no
    event tells of it. A group is as ready as its last pod.
    """
    if workload.get("kind") != names.GROUP_KIND:
        return workload
    spec, size, template = workload["spec"], group_size(workload), pod_template(workload)
    newest = _template_hash(template)
    groups = [[pod, *(one for one in workers if group_index(one) == group_index(pod))] for pod in leaders]
    ready = sum(
        len(group) == size and all(is_ready(pod) for pod in group)
        for group in groups
        if "deletionTimestamp" not in group[0]["metadata"]
    )
    updated = sum(all(revision_of(pod) == newest for pod in group) for group in groups)
    is_complete = ready == updated == len(groups) == int(spec.get("replicas", 1))
    update = (spec.get("rolloutStrategy") or {}).get("rollingUpdateConfiguration") or {}
    progressing = {
        "type": "Progressing",
        "status": "True",
        "reason": "NewReplicaSetAvailable" if is_complete else "ReplicaSetUpdated",
    }
    return {
        **workload,
        "spec": {
            "replicas": spec.get("replicas", 1),
            "template": template,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            **({"paused": True} if update.get("partition") else {}),
        },
        "status": {
            "observedGeneration": workload["metadata"].get("generation", 0),
            "replicas": len(groups),
            "updatedReplicas": updated,
            "readyReplicas": ready,
            "availableReplicas": ready,
            "conditions": [progressing],
        },
    }


def replica_failure(deployment: Body | None) -> Body:
    """The condition with which the Deployment controller reports pods that cannot be created; empty where
    none is refused.
    """
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or ()
    return next(
        (c for c in conditions if c.get("type") == "ReplicaFailure" and c.get("status") == "True"), {}
    )


def lacks_resources_since(pod: Body) -> str:
    """Since when the pod waits for resources or quota that another pod may free; empty unless that is what it
    lacks.

    Where no node matches or has as much, or a volume is missing, deleting another pod would not help.
    """
    message = scheduler_message(pod)
    is_lack = _LACKS_RESOURCES.search(message) and are_held_by_pods(message) is not False
    lacks_resources = _scheduled(pod).get("reason") == "Unschedulable" and is_lack
    return unscheduled_since(pod) if lacks_resources or is_gated_by_kueue(pod) else ""


def unscheduled_since(pod: Body) -> str:
    """Since when the pod is unschedulable; empty for a pod with a node. The API server gives no time for a
    scheduling gate: the creation time is used then.
    """
    scheduled = _scheduled(pod)
    if scheduled.get("status") != "False":
        return ""
    return str(scheduled.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp") or "")


def scheduling_gates(pod: Body) -> list[str]:
    """The scheduling gates that hold the pod back."""
    return [str(gate.get("name")) for gate in (pod.get("spec") or {}).get("schedulingGates") or ()]


def is_gated_by_kueue(pod: Body) -> bool:
    """Whether Kueue holds the pod back for lack of quota."""
    return any(gate.startswith(names.KUEUE_GATES) for gate in scheduling_gates(pod))


def scheduler_message(pod: Body) -> str:
    """Why the pod has no node, in the scheduler's words."""
    return str(_scheduled(pod).get("message", ""))


def are_held_by_pods(message: str) -> bool | None:
    """Whether other pods hold the resources that a pod waits for. False where no node that may take the pod
    has as much; None where the scheduler's message does not say.
    """
    if _HELD_BY_PODS in message:
        return True
    return False if _ON_NO_NODE in message else None


def _scheduled(pod: Body) -> Body:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c.get("type") == "PodScheduled"), {})


def is_replaced_in_place(deployment: Body) -> bool:
    """Whether its pods are replaced without a surge pod."""
    strategy = (deployment.get("spec") or {}).get("strategy") or {}
    return (strategy.get("rollingUpdate") or {}).get("maxSurge") == 0


def pod_template(workload: Body) -> Body:
    """The template of the pods that serve, of a Deployment or a LeaderWorkerSet; empty where it has none."""
    spec = workload.get("spec") or {}
    return spec.get("template") or (spec.get("leaderWorkerTemplate") or {}).get("leaderTemplate") or {}


def served_model(workload: Body) -> tuple[str, str]:
    """The claim and the directory from which its pods serve the model; empty where they have none."""
    spec = pod_template(workload).get("spec") or {}
    volumes = {one.get("name"): one for one in spec.get("volumes") or ()}
    claim = (volumes.get("model") or {}).get("persistentVolumeClaim") or {}
    servers = [one for one in spec.get("containers") or () if one.get("name") == names.CONTAINER]
    arguments = [*(servers[0].get("args") or ()), "", ""] if servers else ["", ""]
    return str(claim.get("claimName", "")), str(arguments[1])


def ended(job: Body) -> dict[str, Body]:
    """The condition Complete or Failed of a Job that has ended, by type; empty while it runs."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return {
        str(c["type"]): c
        for c in conditions
        if c.get("status") == "True" and c.get("type") in ("Complete", "Failed")
    }


def managers_of_replicas(body: Body) -> list[dict[str, Any]]:
    """The managedFields entries that own spec.replicas, reduced to that field."""
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
