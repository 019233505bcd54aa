"""What the accelerators of an LLMDeployment cost per hour, by the price in its AcceleratorProfile.

For the operator's metric. Pure; knows no currency, since the price has none.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire_operator import names
from quire_operator.observed import Body, Observed
from quire_operator.spec import Profile
from quire_operator.status.accelerator_fit import RequestedAccelerator

_ENDED = ("Failed", "Succeeded")


def per_hour(requested: RequestedAccelerator, observed: Observed) -> float | None:
    """The pods of both roles, on all nodes; None without a price. A pod has its accelerators from the moment
    it has a node, also while it drains.
    """
    pods = {
        names.ROLE_LEADER: (*observed.in_role(names.ROLE_LEADER).pods, *observed.workers),
        names.ROLE_PREFILL: observed.in_role(names.ROLE_PREFILL).pods,
    }
    found = [
        _of_pods(profile, pods[role])
        for role in pods
        if (profile := requested.of_role(role)) is not None and profile.cost_per_hour
    ]
    return sum(found) if found else None


def _of_pods(profile: Profile, pods: Iterable[Body]) -> float:
    placed = [pod for pod in pods if _holds_accelerator(pod)]
    return float(profile.cost_per_hour) * sum(_accelerators(pod, profile.resource_name) for pod in placed)


def _accelerators(pod: Body, resource: str) -> int:
    """How many the pod itself asks for: those of an earlier revision may have been fewer."""
    containers = (pod.get("spec") or {}).get("containers") or [{}]
    limits = (containers[0].get("resources") or {}).get("limits") or {}
    return int(limits.get(resource, 1))


def _holds_accelerator(pod: Body) -> bool:
    has_node = bool((pod.get("spec") or {}).get("nodeName"))
    return has_node and (pod.get("status") or {}).get("phase") not in _ENDED
