"""Scheduling fields of the pod: node selector, tolerations, affinity, priority, topology spread, GPU
resource.

The LLMDeployment's fields are merged with those of its AcceleratorProfile and take precedence. Spot nodes are
recognized by the labels and taints of the large providers.
"""

from __future__ import annotations

from typing import Any

from quire_operator import names
from quire_operator.resources.manifest import Manifest, as_manifest, compact
from quire_operator.spec import LLMDeployment, Profile
from quire_operator.spec.schema import AUTO, Affinity, NodeSelectorTerm, Spec, Spot

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


def devices(spec: Spec, profile: Profile | None) -> dict[str, str]:
    """The extended resource of one pod, one for each of its ranks; empty for the CPU."""
    count = str(spec.parallelism.ranks_per_pod)
    if spec.resources.gpu is not None:
        return {spec.resources.gpu.resource_name: count}
    return {} if profile is None else {profile.resource_name: count}


def build(model: LLMDeployment, profile: Profile | None) -> dict[str, Any]:
    """Fields of the pod's spec."""
    scheduling = model.spec.scheduling
    by_profile = profile or Profile(memory="0")
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names.selector_labels(model.name, model.role)},
    }
    spot = [_tolerates(key, value) for key, value in SPOT_TAINTS] if scheduling.spot.enabled else []
    own = [as_manifest(item) for item in (*scheduling.tolerations, *by_profile.tolerations)]
    tolerations = [*own, *spot]
    return compact(
        {
            "nodeSelector": {**by_profile.node_selector, **scheduling.node_selector},
            "tolerations": [each for i, each in enumerate(tolerations) if each not in tolerations[:i]],
            "affinity": _with_group(model, _with_spot(scheduling.affinity, scheduling.spot)),
            "priorityClassName": scheduling.priority_class_name,
            "runtimeClassName": scheduling.runtime_class_name or by_profile.runtime_class_name,
            "schedulerName": scheduling.scheduler_name,
            "topologySpreadConstraints": [spread] if scheduling.topology_spread == AUTO else [],
        }
    )


def may_run_on_spot_nodes(model: LLMDeployment, profile: Profile | None) -> bool:
    """Whether the pods' placement names spot nodes: by `scheduling.spot`, or by their labels or taints."""
    scheduling, by_profile = model.spec.scheduling, profile or Profile(memory="0")
    if scheduling.spot.enabled:
        return True
    chosen = {*by_profile.node_selector.items(), *scheduling.node_selector.items()}
    chosen |= {
        (expression.key, value)
        for term in _node_selector_terms(scheduling.affinity)
        for expression in term.match_expressions
        if expression.operator == "In"
        for value in expression.values
    }
    tolerated = {each.key for each in (*scheduling.tolerations, *by_profile.tolerations)}
    return not chosen.isdisjoint(SPOT_LABELS) or any(key in tolerated for key, _ in SPOT_TAINTS)


def _node_selector_terms(affinity: Affinity | None) -> list[NodeSelectorTerm]:
    nodes = affinity.node_affinity if affinity is not None else None
    if nodes is None:
        return []
    required = nodes.required_during_scheduling_ignored_during_execution
    preferred = nodes.preferred_during_scheduling_ignored_during_execution
    terms = required.node_selector_terms if required is not None else ()
    return [*terms, *(each.preference for each in preferred)]


def _tolerates(key: str, value: str) -> Manifest:
    return {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}


def _with_group(model: LLMDeployment, affinity: Manifest) -> Manifest:
    """With a rule that keeps pods of one group on different nodes."""
    if not model.is_grouped:
        return affinity
    apart = {
        "labelSelector": {"matchLabels": {names.LABEL_NAME: model.name}},
        "matchLabelKeys": [names.LABEL_GROUP_KEY],
        "topologyKey": "kubernetes.io/hostname",
    }
    own = affinity.get("podAntiAffinity", {})
    return {**affinity, "podAntiAffinity": {**own, _REQUIRED: [*own.get(_REQUIRED, []), apart]}}


def _with_spot(affinity: Affinity | None, spot: Spot) -> Manifest:
    """The user's affinity with one for spot nodes added: preferred, or required without fallback to on-demand
    nodes.

    Terms of a node selector are alternatives, so each of the user's is combined with each label.
    """
    given: Manifest = as_manifest(affinity) if affinity is not None else {}
    if not spot.enabled:
        return given
    nodes = given.get("nodeAffinity", {})
    labels = [{"key": key, "operator": "In", "values": [value]} for key, value in SPOT_LABELS]
    if spot.fallback_to_on_demand:
        preferred = [{"weight": 100, "preference": {"matchExpressions": [label]}} for label in labels]
        added: Manifest = {_PREFERRED: [*nodes.get(_PREFERRED, []), *preferred]}
    else:
        terms = nodes.get(_REQUIRED, {}).get("nodeSelectorTerms", [{}])
        joined = [
            {**term, "matchExpressions": [*term.get("matchExpressions", []), label]}
            for term in terms
            for label in labels
        ]
        added = {_REQUIRED: {"nodeSelectorTerms": joined}}
    return {**given, "nodeAffinity": {**nodes, **added}}
