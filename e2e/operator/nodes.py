"""A node and a bound claim for tests in which Kubernetes' own scheduler places pods and no kubelet runs."""

from __future__ import annotations

from e2e.operator import pods
from e2e.operator.world import Body, World

GPU = "nvidia.com/gpu"
MERGE = "application/merge-patch+json"


def make_node(world: World, gpus: int) -> None:
    world.client.request("POST", "/api/v1/nodes", {"metadata": {"name": "node-1"}})
    room = {"cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "100Gi", GPU: str(gpus)}
    status = {"capacity": room, "allocatable": room, "conditions": [pods.condition("Ready", "True")]}
    world.client.request("PATCH", "/api/v1/nodes/node-1/status", {"status": status}, MERGE)
    world.client.request("PATCH", "/api/v1/nodes/node-1", {"spec": {"taints": None}}, MERGE)


def make_claim(world: World, namespace: str) -> None:
    """The bound claim `models`: nothing here binds one."""
    size = {"storage": "1Gi"}
    volume: Body = {
        "metadata": {"name": namespace},
        "spec": {
            "capacity": size,
            "accessModes": ["ReadOnlyMany"],
            "hostPath": {"path": "/models"},
            "claimRef": {"namespace": namespace, "name": "models"},
        },
    }
    world.client.request("POST", "/api/v1/persistentvolumes", volume)
    claim: Body = {
        "metadata": {"name": "models", "annotations": {"pv.kubernetes.io/bind-completed": "yes"}},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "resources": {"requests": size},
            "volumeName": namespace,
            "storageClassName": "",
        },
    }
    world.client.request("POST", f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", claim)
