"""LLMDeployments, Deployments and pods as dicts, and the status that is computed from them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from e2e.operator import pods as kubelet
from quire_operator import names, spec, status
from quire_operator.observed import Observed, Ref

Body = dict[str, Any]


LIMITS = {"memory": "2Gi", "nvidia.com/gpu": "1"}


def model_body(generation: int = 2, **fields: Any) -> Body:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "m", "namespace": "ns", "uid": "u1", "generation": generation},
        "spec": {
            "model": {"source": {"pvc": {"claimName": "models"}}},
            "resources": {"cpu": "1", "memory": "2Gi"},
            **fields,
        },
    }


def deployment(
    *, replicas: int = 1, updated: int | None = None, ready: int = 0, seen: bool = True, **conditions: str
) -> Body:
    return {
        "kind": "Deployment",
        "metadata": {"name": "m", "uid": "d1", "generation": 4},
        "spec": {
            "template": {"spec": {"containers": [{"name": "server", "image": "engine:1"}]}},
            "paused": False,
        },
        "status": {
            "observedGeneration": 4 if seen else 3,
            "replicas": replicas,
            "updatedReplicas": replicas if updated is None else updated,
            "readyReplicas": ready,
            "availableReplicas": ready,
            "conditions": [
                {"type": kind, "status": "False", "reason": reason} for kind, reason in conditions.items()
            ],
        },
    }


def replica_set(uid: str, revision: int) -> Body:
    return {
        "kind": "ReplicaSet",
        "metadata": {
            "name": uid,
            "uid": uid,
            "annotations": {"deployment.kubernetes.io/revision": str(revision)},
        },
    }


def pod(reported: Body, *, name: str = "m-0", of: str = "rs2", node: str = "node-1") -> Body:
    placed = "False" not in [
        c["status"] for c in reported.get("conditions", ()) if c["type"] == "PodScheduled"
    ]
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "creationTimestamp": kubelet.at(-60),
            "ownerReferences": [{"controller": True, "uid": of}],
        },
        "spec": {
            "nodeName": node if placed else "",
            "containers": [{"name": "server", "image": "engine:1", "resources": {"limits": LIMITS}}],
            "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": "models"}}],
        },
        "status": reported,
    }


def compute(
    *pods: Body, of: Body | None = None, body: Body | None = None, old: Body | None = None, **fields: Any
) -> Body:
    body = body or model_body()
    problem, now = fields.pop("problem", None), fields.pop("now", datetime.now(UTC))
    accelerator = fields.pop("accelerator", status.RequestedAccelerator())
    observed = Observed(
        body={**body, "status": old or {}},
        children={Ref("Deployment", "m"): of or deployment()},
        replica_sets=(replica_set("rs1", 1), replica_set("rs2", 2)),
        pods=pods,
        **fields,
    )
    return status.compute_status(
        spec.parse(body), observed, now=now, problem=problem, accelerator=accelerator
    )


def condition(computed: Body, kind: str) -> tuple[str, str]:
    (found,) = [c for c in computed["conditions"] if c["type"] == kind]
    return found["status"], found["reason"]


FAILURES: dict[str, Body] = {
    "ModelNotFound": kubelet.terminated(66, "ModelNotFound"),
    "ModelCorrupt": kubelet.terminated(65, "ModelCorrupt"),
    "ConfigError": kubelet.terminated(2, "ConfigError"),
    "StartupTimeout": kubelet.terminated(74, "StartupTimeout"),
    "LoadStalled": kubelet.terminated(75, "LoadStalled"),
    "OOMKilled": kubelet.killed_for_memory(),
    "GPUOutOfMemory": kubelet.terminated(76, "GPUOutOfMemory"),
    "EngineCrashed": kubelet.terminated(70, "EngineCrashed"),
    "EngineStalled": kubelet.terminated(71, "EngineStalled"),
    "ProcessStalled": kubelet.terminated(72, "ProcessStalled"),
    "CanaryMismatch": kubelet.terminated(78, "CanaryMismatch"),
    "MixedRevision": kubelet.terminated(79, "MixedRevision"),
    "ServerExited": kubelet.ended_well(),
    "ImagePullFailed": kubelet.waiting("ImagePullBackOff", 'Back-off pulling image "engine:1"'),
    "WaitingForGPU": kubelet.unschedulable("0/2 nodes are available: 2 Insufficient nvidia.com/gpu."),
    "WaitingForNode": kubelet.unschedulable("0/1 nodes are available: 1 Insufficient cpu."),
    "NodeLost": kubelet.silent(),
    "VolumePending": kubelet.unschedulable("pod has unbound immediate PersistentVolumeClaims"),
}
