"""status.roles, and the condition TransferDegraded: whether decode pods compute prompts that prefill pods
should have computed.

Decode pods answer in any case, so the condition only warns; it is no part of Ready. What they report about
their last transfer is believed of themselves alone. Pure; decides about no pod.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire_operator import names
from quire_operator.status import reasons
from quire_operator.status.conditions import RolloutState
from quire_operator.status.pods import PodState
from quire_operator.status.reasons import ConditionValue

_NAMES = {names.ROLE_LEADER: "decode", names.ROLE_PREFILL: "prefill"}


def summary(by_role: Mapping[str, RolloutState]) -> list[dict[str, Any]]:
    """status.roles; empty where all pods have the same role."""
    if len(by_role) < 2:
        return []
    return [
        {
            "name": _NAMES[role],
            "desiredReplicas": state.wanted,
            "readyReplicas": state.ready,
            "updatedReplicas": state.updated,
        }
        for role, state in by_role.items()
    ]


def condition(decode: Sequence[PodState], prefill: RolloutState) -> ConditionValue | None:
    """TransferDegraded; None while no pods are wanted. `decode`: the pods that stay."""
    if not prefill.wanted:
        return None
    ready = [state for state in decode if state.ready]
    if not ready:
        return "Unknown", "NoReadyReplica", "No decode pod answers requests."
    if not prefill.ready:
        return "True", "TransferDegraded", reasons.message("TransferDegraded", "no prefill pod is ready")
    failing = [state.name for state in ready if state.sample is not None and state.sample.transfer_degraded]
    if failing:
        count = f"the last long prompt of {len(failing)} of {len(ready)} decode pods, such as {failing[0]}"
        return "True", "TransferDegraded", reasons.message("TransferDegraded", count)
    return "False", "AsExpected", f"{prefill.ready} prefill pods compute long prompts."
