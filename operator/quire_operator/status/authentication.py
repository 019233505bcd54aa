"""Whether pods of an LLMDeployment prove to each other that they belong together: RanksAuthenticated of
groups, TransfersAuthenticated of prefill and decode pods.

By the key of the same Secret, which the operator does not read; without one the NetworkPolicy alone keeps
other pods away. A warning, and no part of Ready. Pure.
"""

from __future__ import annotations

from quire_operator.spec import LLMDeployment
from quire_operator.status import reasons
from quire_operator.status.reasons import ConditionValue

_OF_NIXL = " NIXL has no authentication: its ports are protected by the NetworkPolicy alone."


def of_ranks(model: LLMDeployment) -> ConditionValue | None:
    """None where a replica is one pod."""
    return _condition(model, "RanksUnauthenticated") if model.is_grouped else None


def of_transfers(model: LLMDeployment) -> ConditionValue | None:
    """None where all pods have the same role."""
    roles = model.spec.disaggregation
    if roles is None:
        return None
    status, reason, message = _condition(model, "TransfersUnauthenticated")
    return status, reason, message + (_OF_NIXL if roles.transport == "NIXL" else "")


def _condition(model: LLMDeployment, without: str) -> ConditionValue:
    """`without`: the reason where there is no Secret."""
    if (key := model.spec.parallelism.auth_secret_ref) is not None:
        return (
            "True",
            "KeyOfSecret",
            f"Pods prove that they mount Secret {key.name} of parallelism.authSecretRef.",
        )
    if (key := model.spec.security.api_keys_secret_ref) is not None:
        return "True", "KeyOfAPIKeys", f"Pods prove that they mount Secret {key.name} of the API keys."
    isolated = model.spec.networking.network_policy.mode != "None"
    detail = (
        "the NetworkPolicy alone keeps other pods away" if isolated else "there is no NetworkPolicy either"
    )
    return "False", without, reasons.message(without, detail)
