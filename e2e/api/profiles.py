"""AcceleratorProfiles to test with: the CRD, one with every field, the ones that the chart ships, and cases
for every CEL rule.

The cases are used twice: on a real API server against the CRD, and against quire_operator.spec.profiles.
"""

from __future__ import annotations

from typing import Any

from e2e import yaml_files
from e2e.api.specs import ROOT, Body, merged, schemas
from quire_operator import spec
from quire_operator.spec import Profile
from quire_operator.spec.profiles import parse

CRD: Body = yaml_files.load((ROOT / "crds" / "acceleratorprofiles.yaml").read_text(encoding="utf-8"))
SCHEMA: Body = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SHIPPED_FILE = ROOT / "charts" / "quire" / "files" / "default-profiles.yaml"
SHIPPED: tuple[Body, ...] = tuple(yaml_files.load_all(SHIPPED_FILE.read_text(encoding="utf-8")))

FULL: Body = {
    "apiVersion": "serving.quire.dev/v1alpha1",
    "kind": "AcceleratorProfile",
    "metadata": {"name": "h100"},
    "spec": {
        "resourceName": "example.com/h100",
        "memory": "80G",
        "memoryBandwidth": "3350G",
        "interconnect": "NVLink",
        "nodeSelector": {"example.com/gpu": "h100", "disktype": "hdd"},
        "tolerations": [
            {"key": "example.com/h100", "operator": "Exists", "effect": "NoSchedule"},
            {
                "key": "dedicated",
                "operator": "Equal",
                "value": "a",
                "effect": "NoExecute",
                "tolerationSeconds": 9,
            },
        ],
        "runtimeClassName": "nvidia",
        "costPerHour": "2.49",
    },
}


def profile(**fields: Any) -> Body:
    """The least that a profile says, and `fields` over it."""
    return merged({**FULL, "spec": {"memory": "80G"}}, {"spec": fields})


def named_by(body: Body) -> dict[str, Profile | None]:
    """FULL as the operator reads it, for pods of each role that name any profile: for `resources.build`."""
    model = spec.parse(body)
    roles = {"profile": model, "prefill_profile": model.prefill}
    return {
        name: parse(FULL) if role is not None and role.spec.resources.profile_ref is not None else None
        for name, role in roles.items()
    }


def rules() -> list[str]:
    """Every CEL rule: path#index."""
    return [
        f"{path}#{index}"
        for path, schema in schemas(SCHEMA)
        for index, _ in enumerate(schema.get("x-kubernetes-validations", []))
    ]


#: By rule: what is accepted, what is refused.
CASES: dict[str, tuple[tuple[Body, ...], tuple[Body, ...]]] = {
    "spec.memory#0": (
        (profile(memory="1Gi"), profile(memory=80_000_000_000), profile(memory="64Ti")),
        (profile(memory="80"), profile(memory="80GB"), profile(memory="65Ti"), profile(memory="-1Gi")),
    ),
    "spec.memoryBandwidth#0": (
        (profile(memoryBandwidth="3350G"), profile(memoryBandwidth="1024T")),
        (profile(memoryBandwidth="0"), profile(memoryBandwidth="1025T"), profile(memoryBandwidth="fast")),
    ),
    "spec.nodeSelector#0": (
        (profile(nodeSelector={"nvidia.com/gpu.product": "NVIDIA-L4"}),),
        (profile(nodeSelector={"not a key": "x"}),),
    ),
    "spec.tolerations[]#0": (
        (profile(tolerations=[{"operator": "Exists"}]),),
        (profile(tolerations=[{"key": "a", "operator": "Exists", "value": "x"}]),),
    ),
    "spec.tolerations[]#1": (
        (profile(tolerations=[{"key": "a", "value": "x"}]),),
        (profile(tolerations=[{"value": "x"}]),),
    ),
    "spec.tolerations[]#2": (
        (profile(tolerations=[{"key": "a", "effect": "NoExecute", "tolerationSeconds": 1}]),),
        (profile(tolerations=[{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 1}]),),
    ),
}
