"""Scheduling fields of the pod: node selector, tolerations, affinity, priority, topology spread, GPU
resource.

The LLMDeployment's fields are merged with those of its AcceleratorProfile and take precedence. Spot nodes are
recognized by the labels and taints of the large providers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_operator import names
from quire_operator.resources.manifest import Manifest, compact
from quire_operator.spec import LLMDeployment, Profile, Toleration
from quire_operator.spec.schema import AUTO, Resources, Spot

# GKE, EKS, Karpenter, AKS.
SPOT_LABELS = (
    ("cloud.google.com/gke-spot", "true"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("karpenter.sh/capacity-type", "spot"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)
# NoSchedule taints only: a NoExecute taint, with which a provider reclaims the node, is not tolerated, so
# that pods drain at once.
SPOT_TAINTS = (
    ("cloud.google.com/gke-spot", "true"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def devices(resources: Resources, profile: Profile | None) -> dict[str, str]:
    """The extended resource of one replica; empty for the CPU."""
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
    """The user's affinity with one for spot nodes added: preferred, or required without fallback to on-demand
    nodes.

    Terms of a node selector are alternatives, so each of the user's is combined with each label. The user's
    affinity has no schema: an invalid one is passed on unchanged, so that the API server reports the error.
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
    """Without empty lists and nulls, which the API server drops; empty selectors stay, because they match
    everything.
    """
    if isinstance(value, Mapping):
        entries = {key: _without_empty_lists(entry) for key, entry in value.items()}
        return {key: entry for key, entry in entries.items() if entry is not None and entry != []}
    return [_without_empty_lists(entry) for entry in value] if isinstance(value, list) else value
