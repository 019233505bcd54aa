"""Accepted and refused objects for the rules of `disaggregation`. Part of `cases`."""

from __future__ import annotations

from typing import Any

from e2e.api.specs import Body, minimal


def _roles(*, prefill: Body | None = None, decode: Body | None = None, **spec: Any) -> Body:
    roles = {"prefill": prefill or {}} | ({} if decode is None else {"decode": decode})
    return minimal(disaggregation=roles, **spec)


def _own(memory: str, cpu: str = "1") -> Body:
    return {"resources": {"cpu": cpu, "memory": memory}}


def _on_gpu(**accelerator: Any) -> Body:
    return {"resources": {"cpu": "1", "memory": "8Gi", **(accelerator or {"gpu": {}})}}


def _staged(size: str, **fields: Any) -> Body:
    """Pods of 8 GiB with a GPU, or what `fields` say of them."""
    body = _roles(**{"resources": {"gpu": {}, "memory": "8Gi"}, **fields})
    body["spec"]["disaggregation"]["stagingMemory"] = size
    return body


def _memory(*, accepted: tuple[str, ...], refused: tuple[str, ...], role: str) -> dict[str, Any]:
    return {
        "field": f"spec.disaggregation.{role}.resources.memory",
        "accepted": tuple(_roles(**{role: _own(memory)}) for memory in accepted),
        "refused": tuple(_roles(**{role: _own(memory)}) for memory in refused),
    }


def _cpu(role: str) -> dict[str, Any]:
    return {
        "field": f"spec.disaggregation.{role}.resources.cpu",
        "accepted": tuple(_roles(**{role: _own("1Gi", cpu)}) for cpu in ("1", "500m", "1024")),
        "refused": tuple(_roles(**{role: _own("1Gi", cpu)}) for cpu in ("0", "1025", "many")),
    }


def _room(role: str) -> dict[str, Any]:
    return {
        "field": "spec.disaggregation",
        "accepted": (
            _roles(**{role: _own("64Mi")}, engine={"kvCache": {"memory": "63Mi"}}),
            _roles(**{role: _own("1Gi")}, resources={"sharedMemory": "512Mi"}),
            _roles(**{role: _own("64Mi")}, resources={"sharedMemory": "Auto"}),
            _roles(
                **{role: _own("8Gi")},
                engine={"kvCache": {"memory": "64Gi"}},
                resources={"gpu": {}, "memory": "8Gi"},
            ),
        ),
        "refused": (
            _roles(**{role: _own("64Mi")}, engine={"kvCache": {"memory": "64Mi"}}),
            _roles(**{role: _own("512Mi")}, resources={"sharedMemory": "512Mi"}),
        ),
    }


def _ranks(role: str) -> dict[str, Any]:
    """Half a CPU for each rank, of the role where it says so, else of the spec."""
    three: Body = {"parallelism": {"tensor": 3}}
    return {
        "field": "spec.disaggregation",
        "accepted": (
            _roles(**{role: three}, resources={"cpu": "1500m"}),
            _roles(**{role: {**three, **_own("1Gi", "1.5")}}, resources={"cpu": "1"}),
            _roles(**{role: {"parallelism": {}}}, resources={"cpu": "100m"}),
            _roles(**{role: _own("1Gi", "2")}, parallelism={"tensor": 4}, resources={"cpu": "2"}),
        ),
        "refused": (
            _roles(**{role: three}, resources={"cpu": "1.4"}),
            _roles(**{role: {**three, **_own("1Gi", "1.4")}}, resources={"cpu": "4"}),
            _roles(**{role: {"parallelism": {"tensor": 2, "pipeline": 2}}}, resources={"cpu": "1.9"}),
            _roles(**{role: _own("1Gi", "1.9")}, parallelism={"tensor": 4}, resources={"cpu": "2"}),
        ),
    }


def _transport(name: str, **spec: Any) -> Body:
    return minimal(disaggregation={"prefill": {}, "transport": name}, **spec)


_OPEN: Body = {"networkPolicy": {"mode": "None"}}
_OFFLOAD: Body = {"kvCache": {"hostOffload": "64Mi"}}
_DRAFT: Body = {"speculation": {"method": "DraftModel", "draftModelPath": "drafts/small"}}

# By rule: the arguments of `cases.Cases`.
DISAGGREGATION_CASES: dict[str, dict[str, Any]] = {
    "spec#14": {
        "field": "spec.disaggregation",
        "accepted": (
            _roles(),
            _roles(resources={"gpu": {}, "memory": "8Gi"}),
            _roles(resources={"profileRef": {"name": "h100"}, "memory": "8Gi"}),
            _roles(prefill=_on_gpu(), decode=_on_gpu()),
            _roles(prefill=_on_gpu(profileRef={"name": "a"}), decode=_on_gpu(profileRef={"name": "b"})),
            _roles(prefill=_on_gpu(profileRef={"name": "a"}), resources={"gpu": {}, "memory": "8Gi"}),
            _roles(prefill=_own("8Gi"), resources={"gpu": {}, "memory": "8Gi"}),
        ),
        "refused": (
            _roles(prefill=_on_gpu()),
            _roles(prefill=_on_gpu(), decode={}),
            _roles(decode=_on_gpu(), prefill=_own("8Gi")),
            _roles(decode=_on_gpu(profileRef={"name": "h100"})),
        ),
    },
    "spec#15": {
        "field": "spec.disaggregation",
        "accepted": (
            _roles(parallelism={"tensor": 2, "pipeline": 2}, resources={"cpu": "4"}),
            minimal(parallelism={"tensor": 2, "nodes": 2}),
        ),
        "refused": (_roles(parallelism={"tensor": 2, "nodes": 2}, resources={"cpu": "4"}),),
    },
    "spec#16": {
        "field": "spec.disaggregation",
        "accepted": (_roles(engine={"prefixCaching": True}), minimal(engine={"prefixCaching": False})),
        "refused": (_roles(engine={"prefixCaching": False}),),
    },
    "spec#17": {
        "field": "spec.disaggregation",
        "accepted": (
            _roles(engine={"kvCache": {"memory": "64Mi"}}),
            _roles(engine={"speculation": {"method": "NGram"}}),
            minimal(engine=_OFFLOAD),
        ),
        "refused": (_roles(engine=_OFFLOAD), _roles(engine=_DRAFT), _roles(engine={**_OFFLOAD, **_DRAFT})),
    },
    "spec#18": {
        "field": "spec.disaggregation",
        "accepted": (
            _roles(decode={"replicas": 2}),
            _roles(decode={"replicas": 2}, replicas=1),
            _roles(decode={}, replicas=2),
            _roles(replicas=0),
            _roles(autoscaling={"maxReplicas": 2}),
        ),
        "refused": (
            _roles(decode={"replicas": 2}, replicas=3),
            _roles(decode={"replicas": 1}, replicas=0),
            _roles(decode={"replicas": 2}, autoscaling={"maxReplicas": 2}),
        ),
    },
    "spec#19": {
        "field": "spec.disaggregation",
        "accepted": (
            _roles(autoscaling={"maxReplicas": 2, "backend": "KEDA"}),
            minimal(autoscaling={"maxReplicas": 2, "idle": {}}),
        ),
        "refused": (
            _roles(autoscaling={"maxReplicas": 2, "idle": {}}),
            _roles(autoscaling={"minReplicas": 0, "maxReplicas": 2}),
        ),
    },
    **{f"spec#{rule}": _room(role) for rule, role in ((20, "prefill"), (21, "decode"))},
    **{f"spec#{rule}": _ranks(role) for rule, role in ((22, "prefill"), (23, "decode"))},
    **{
        f"spec.disaggregation.{role}.parallelism#0": {
            "field": f"spec.disaggregation.{role}.parallelism",
            "accepted": (
                _roles(**{role: {"parallelism": {"tensor": 8, "pipeline": 4}}}, resources={"cpu": "16"}),
            ),
            "refused": (
                _roles(**{role: {"parallelism": {"tensor": 11, "pipeline": 3}}}, resources={"cpu": "32"}),
            ),
        }
        for role in ("prefill", "decode")
    },
    "spec#24": {
        "field": "spec.disaggregation",
        "accepted": (
            _transport("NIXL"),
            _transport("NIXL", networking={"networkPolicy": {"mode": "Restricted"}}),
            *(_transport(one, networking=_OPEN) for one in ("Auto", "TCP")),
            minimal(networking=_OPEN),
        ),
        "refused": (_transport("NIXL", networking=_OPEN),),
    },
    "spec#25": {
        "field": "spec.disaggregation",
        "accepted": (
            _staged("7Gi"),
            _staged("4Gi", engine={"weightOffload": "3Gi"}),
            _staged("7Gi", prefill=_own("16Gi"), decode=_own("8Gi")),
        ),
        "refused": (
            _staged("8Gi"),
            _staged("4Gi", engine={"weightOffload": "4Gi"}),
            _staged("9Gi", prefill=_own("16Gi")),
            _staged("9Gi", prefill=_own("8Gi"), decode=_own("16Gi")),
            _staged("8Gi", prefill=_on_gpu(), decode=_on_gpu(), resources={}),
            _roles(resources={"gpu": {}, "memory": "4Gi"}),
        ),
    },
    "spec#41": {
        "field": "spec.disaggregation",
        "accepted": (
            _staged("4Gi", resources={"memory": "1Gi"}),
            _staged("7Gi", resources={"memory": "8Gi", "profileRef": {"name": "h100"}}),
            _staged("7Gi", prefill=_on_gpu(), decode=_on_gpu(), resources={}),
        ),
        "refused": (_staged("100Gi", resources={"memory": "1Gi"}), _staged("1Gi", resources={})),
    },
    "spec.disaggregation.stagingMemory#0": {
        "field": "spec.disaggregation.stagingMemory",
        "accepted": tuple(_staged(size) for size in ("1", "512Mi", "7.5Gi")),
        "refused": tuple(_staged(size, resources={}) for size in ("0", "65Ti", "much")),
    },
    **{
        f"spec.disaggregation.{role}.resources#0": {
            "field": f"spec.disaggregation.{role}.resources.profileRef",
            "accepted": (_roles(**{role: _on_gpu()}, resources={"gpu": {}, "memory": "8Gi"}),),
            "refused": (
                _roles(
                    **{role: _on_gpu(gpu={}, profileRef={"name": "h100"})},
                    resources={"gpu": {}, "memory": "8Gi"},
                ),
            ),
        }
        for role in ("prefill", "decode")
    },
    "spec.disaggregation.prefill#0": {
        "field": "spec.disaggregation.prefill.autoscaling",
        "accepted": (
            _roles(prefill={"replicas": 2}),
            _roles(prefill={"autoscaling": {"maxReplicas": 2}, "replicas": 1}),
        ),
        "refused": (_roles(prefill={"autoscaling": {"maxReplicas": 2}, "replicas": 2}),),
    },
    "spec.disaggregation.prefill.autoscaling#0": {
        "field": "spec.disaggregation.prefill.autoscaling.minReplicas",
        "accepted": (_roles(prefill={"autoscaling": {"minReplicas": 2, "maxReplicas": 2}}),),
        "refused": (_roles(prefill={"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}),),
    },
    **{f"spec.disaggregation.{role}.resources.cpu#0": _cpu(role) for role in ("prefill", "decode")},
    **{
        f"spec.disaggregation.{role}.resources.memory#0": _memory(
            accepted=("64Mi", "4Gi"), refused=("63Mi", "512m", "65Ti"), role=role
        )
        for role in ("prefill", "decode")
    },
}
