"""Where a pod runs: the part of its template that the scheduler reads.

Called by `pod`. What the LLMDeployment says is joined with what the AcceleratorProfile says of its nodes, and
beats it. Spot nodes are known by the labels and taints that the large providers give them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_operator import names
from quire_operator.resources.manifest import Manifest, compact
from quire_operator.spec import LLMDeployment, Profile, Toleration
from quire_operator.spec.placement import AUTO, Resources, Spot

# GKE, EKS, Karpenter, AKS. A node of a cluster has the label of its provider or none.
SPOT_LABELS = (
    ("cloud.google.com/gke-spot", "true"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("karpenter.sh/capacity-type", "spot"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)
# Only to be placed there: a taint NoExecute, with which a provider takes the node back, is not tolerated, so
# that pods drain at once.
SPOT_TAINTS = (
    ("cloud.google.com/gke-spot", "true"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def devices(resources: Resources, profile: Profile | None) -> dict[str, str]:
    """The extended resource that a replica is limited to; none for the CPU."""
    if resources.gpu is not None:
        return {resources.gpu.resource_name: "1"}
    return {} if profile is None else {profile.resource_name: "1"}


def build(model: LLMDeployment, profile: Profile | None) -> dict[str, Any]:
    """Fields of the pod's spec."""
    scheduling = model.spec.scheduling
    by_profile = profile or Profile(memory="0")
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names.selector_labels(model.name)},
    }
    spot = [_tolerates(key, value) for key, value in SPOT_TAINTS] if scheduling.spot.enabled else []
    own = [_toleration(item) for item in (*scheduling.tolerations, *by_profile.tolerations)]
    tolerations = [*own, *spot]
    return compact(
        {
            "nodeSelector": {**by_profile.node_selector, **scheduling.node_selector},
            "tolerations": [each for i, each in enumerate(tolerations) if each not in tolerations[:i]],
            "affinity": _with_spot(_without_empty_lists(scheduling.affinity), scheduling.spot),
            "priorityClassName": scheduling.priority_class_name,
            "runtimeClassName": scheduling.runtime_class_name or by_profile.runtime_class_name,
            "schedulerName": scheduling.scheduler_name,
            "topologySpreadConstraints": [spread] if scheduling.topology_spread == AUTO else [],
        }
    )


def _toleration(item: Toleration) -> Manifest:
    return compact(
        {
            "key": item.key,
            "operator": item.operator,
            "value": item.value,
            "effect": item.effect,
            "tolerationSeconds": item.toleration_seconds,
        }
    )


def _tolerates(key: str, value: str) -> Manifest:
    return {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}


def _with_spot(affinity: Any, spot: Spot) -> Any:
    """The user's affinity, and that for spot nodes: preferred, or required where nothing else will do.

    Terms of a node selector are alternatives, so each of the user's is joined with each label. What the user
    wrote is schemaless: where it is not what it should be, it stays so that the API server says it.
    """
    nodes = affinity.get("nodeAffinity", {})
    added: dict[str, Any] = {}
    if not spot.enabled or not isinstance(nodes, Mapping):
        return affinity
    labels = [{"key": key, "operator": "In", "values": [value]} for key, value in SPOT_LABELS]
    if spot.fallback_to_on_demand:
        known = nodes.get(_PREFERRED, [])
        preferred = [{"weight": 100, "preference": {"matchExpressions": [label]}} for label in labels]
        if isinstance(known, list):
            added = {_PREFERRED: [*known, *preferred]}
    else:
        required = nodes.get(_REQUIRED, {})
        terms = required.get("nodeSelectorTerms", [{}]) if isinstance(required, Mapping) else None
        if not isinstance(terms, list) or not all(_is_term(term) for term in terms):
            return affinity
        joined = [
            {**term, "matchExpressions": [*term.get("matchExpressions", []), label]}
            for term in terms
            for label in labels
        ]
        added = {_REQUIRED: {"nodeSelectorTerms": joined}}
    return {**affinity, "nodeAffinity": {**nodes, **added}}


def _is_term(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("matchExpressions", []), list)


def _without_empty_lists(value: Any) -> Any:
    """The API server drops empty lists and nulls, and keeps empty selectors, which mean everything."""
    if isinstance(value, Mapping):
        entries = {key: _without_empty_lists(entry) for key, entry in value.items()}
        return {key: entry for key, entry in entries.items() if entry is not None and entry != []}
    return [_without_empty_lists(entry) for entry in value] if isinstance(value, list) else value
