"""Accepted and refused objects for the rules of `parallelism`. Part of `cases`."""

from __future__ import annotations

from typing import Any

from e2e.api.specs import Body, minimal


def _ranks(tensor: int, pipeline: int = 1, *, cpu: str = "8", resources: Body | None = None) -> Body:
    sizes = {"tensor": tensor, "pipeline": pipeline}
    return minimal(parallelism=sizes, resources={"cpu": cpu, **(resources or {})})


def _nodes(tensor: int, nodes: int, pipeline: int = 1, *, cpu: str = "8", **spec: Any) -> Body:
    sizes = {"tensor": tensor, "pipeline": pipeline, "nodes": nodes}
    return minimal(**{"parallelism": sizes, "resources": {"cpu": cpu}} | spec)


def _downloaded(mode: str) -> Body:
    source = {"huggingFace": {"repo": "org/model"}, "pvc": None}
    return {"model": {"source": source}, "cache": {"mode": "SharedPVC", "accessMode": mode, "size": "1Gi"}}


# By rule: the arguments of `cases.Cases`.
PARALLELISM_CASES: dict[str, dict[str, Any]] = {
    "spec.parallelism#0": {
        "field": "spec.parallelism",
        "accepted": (
            _ranks(8, 4, cpu="16"),
            _ranks(1, 32, cpu="16"),
            _nodes(8, 4, 4, resources={"cpu": "8", "profileRef": {"name": "h100"}}),
            minimal(parallelism={"pipeline": 2}, resources={"cpu": "1"}),
        ),
        "refused": (_ranks(11, 3, cpu="64"), _ranks(32, 32, cpu="64")),
    },
    "spec#11": {
        "field": "spec.parallelism",
        "accepted": (
            _ranks(1, cpu="100m"),
            minimal(parallelism={}, resources={"cpu": "100m"}),
            _ranks(2, cpu="1"),
            _ranks(3, cpu="1500m"),
            _ranks(14, cpu="1k"),
            _ranks(3, 2, cpu="3"),
            _nodes(4, 2, cpu="1"),
        ),
        "refused": (
            _ranks(2, cpu="0.9"),
            _ranks(1, 2, cpu="0.9"),
            _ranks(3, 2, cpu="2.9"),
            _ranks(3, cpu="1499m"),
            _ranks(14, cpu="6.9"),
            _nodes(4, 2, cpu="900m"),
        ),
    },
    "spec#12": {
        "field": "spec.parallelism",
        "accepted": (
            _nodes(2, 2, **_downloaded("ReadWriteMany")),
            _nodes(2, 1, **_downloaded("ReadWriteOnce")),
        ),
        "refused": (_nodes(2, 2, **_downloaded("ReadWriteOnce")),),
    },
    "spec#13": {
        "field": "spec.parallelism",
        "accepted": (
            _nodes(2, 2),
            _nodes(2, 2, rollout={"strategy": "InPlace"}),
            _nodes(2, 1, rollout={"strategy": "Surge", "minReadySeconds": 5}),
        ),
        "refused": (
            _nodes(2, 2, rollout={"strategy": "Surge"}),
            _nodes(2, 2, rollout={"strategy": "Recreate"}),
            _nodes(2, 2, rollout={"minReadySeconds": 5}),
        ),
    },
    "spec.parallelism#1": {
        "field": "spec.parallelism.nodes",
        "accepted": (
            _nodes(2, 2),
            _nodes(6, 3),
            _nodes(1, 1),
            _nodes(3, 2, 2),
            _nodes(1, 2, 2),
            _nodes(2, 2, resources={"cpu": "4", "gpu": {}}),
            _nodes(8, 2, 2, resources={"cpu": "8", "profileRef": {"name": "h100"}}),
        ),
        "refused": (
            _nodes(3, 2),
            _nodes(1, 2),
            _nodes(2, 4),
            _nodes(3, 4, 2),
            _nodes(4, 3, resources={"cpu": "4", "gpu": {}}),
        ),
    },
}
