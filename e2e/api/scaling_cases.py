"""Accepted and refused objects for the rules of `autoscaling`. Part of `cases`."""

from __future__ import annotations

from typing import Any

from e2e.api.specs import Body, minimal

_HELD = {"activator": {"scalerAddress": "holder.ns:9090"}}
_GPU = {"gpu": {"resourceName": "nvidia.com/gpu"}}


def _scaled(least: int = 1, most: int = 4, **fields: Any) -> Body:
    return minimal(autoscaling={"minReplicas": least, "maxReplicas": most, **fields})


def _metric(kind: str, target: int) -> Body:
    metric = {"type": kind, "targetPerReplica": target}
    return minimal(autoscaling={"maxReplicas": 4, "metrics": [metric]}, resources=_GPU)


# By rule: the arguments of `cases.Cases`.
SCALING_CASES: dict[str, dict[str, Any]] = {
    "spec#4": {
        "field": "spec.autoscaling",
        "accepted": (
            minimal(replicas=0),
            _scaled(),
            minimal(),
            minimal(replicas=1, autoscaling={"maxReplicas": 4}),  # the default, written out
        ),
        "refused": (
            minimal(replicas=2, autoscaling={"maxReplicas": 4}),
            minimal(replicas=0, autoscaling={"maxReplicas": 4, "backend": "External"}),
        ),
    },
    "spec#5": {
        "field": "spec.autoscaling",
        "accepted": (
            minimal(autoscaling={"maxReplicas": 4, "metrics": [{"type": "GPUUtilization"}]}, resources=_GPU),
            _scaled(metrics=[{"type": "QueueDepth"}]),
        ),
        "refused": (_scaled(metrics=[{"type": "QueueDepth"}, {"type": "GPUUtilization"}]),),
    },
    "spec.autoscaling#0": {
        "field": "spec.autoscaling.minReplicas",
        "accepted": (_scaled(3, 3), minimal(autoscaling={"maxReplicas": 1}), _scaled(1, 1000)),
        "refused": (_scaled(4, 3), _scaled(2, 1)),
    },
    "spec.autoscaling#1": {
        "field": "spec.autoscaling.idle",
        "accepted": tuple(_scaled(backend=kind, idle={}) for kind in ("Auto", "HPA", "KEDA")),
        "refused": (_scaled(backend="External", idle={}),),
    },
    "spec.autoscaling#2": {
        "field": "spec.autoscaling.minReplicas",
        "accepted": tuple(_scaled(0, backend=kind) for kind in ("Auto", "HPA", "KEDA")),
        "refused": (_scaled(0, backend="External"),),
    },
    "spec.autoscaling#3": {
        "field": "spec.autoscaling.idle.activator",
        "accepted": (
            _scaled(idle=_HELD),
            _scaled(backend="KEDA", idle=_HELD),
            _scaled(backend="HPA", idle={}),
        ),
        "refused": (_scaled(backend="HPA", idle=_HELD),),
    },
    "spec.autoscaling#4": {
        "field": "spec.autoscaling.fallback",
        "accepted": (_scaled(backend="KEDA", fallback={"replicas": 2}), _scaled(fallback={"replicas": 2})),
        "refused": tuple(_scaled(backend=kind, fallback={"replicas": 2}) for kind in ("HPA", "External")),
    },
    "spec.autoscaling#5": {
        "field": "spec.autoscaling.metrics",
        "accepted": (
            _scaled(idle=_HELD, metrics=[]),
            _scaled(idle=_HELD, metrics=[{"type": "QueueDepth"}, {"type": "RunningRequests"}]),
            _scaled(backend="KEDA", metrics=[{"type": "QueueDepth"}]),
            _scaled(0, metrics=[{"type": "QueueDepth"}]),
            _scaled(idle={}, metrics=[{"type": "QueueDepth"}]),
        ),
        "refused": (
            _scaled(idle=_HELD, metrics=[{"type": "QueueDepth"}]),
            _scaled(0, backend="KEDA", metrics=[{"type": "QueueDepth"}]),
            _scaled(0, fallback={"replicas": 1}, metrics=[{"type": "QueueDepth"}]),
        ),
    },
    "spec.autoscaling.metrics[]#0": {
        "field": "spec.autoscaling.metrics[0].targetPerReplica",
        "accepted": (
            _metric("GPUUtilization", 100),
            _metric("KVCacheUtilization", 1),
            _metric("QueueDepth", 101),
        ),
        "refused": (_metric("GPUUtilization", 101), _metric("KVCacheUtilization", 1000)),
    },
}
