"""The status of what the gateway reads: what is accepted, what it refers to, who has applied it.

Pure: every gateway computes the same. A condition keeps its time while its status is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from quire_gateway import llm_client, llm_external_backend, llm_route, usage_ledger
from quire_gateway.gateway_leases import Generations
from quire_gateway.llm_external_backend import LLMExternalBackend
from quire_gateway.llm_route import LLMRoute
from quire_gateway.rollout import COMPLETED
from quire_gateway.routing_table import Body, Place, RoutingTable, uid_of

Condition = tuple[str, bool, str, str]  # type, status, reason, message


def generation_of(body: Body) -> int:
    """Of the spec of an object."""
    return int(body["metadata"].get("generation", 0))


def route_conditions(
    body: Body,
    table: RoutingTable,
    known: Collection[Place],
    ready: Collection[Place],
    rollout: Mapping[str, Any] | None = None,
) -> list[Condition]:
    """Those of an LLMRoute. ``known``: the LLMDeployments; ``ready``: those with a ready replica;
    ``rollout``: its status.
    """
    rejection = table.rejected.get(uid_of(body))
    if rejection is not None and rejection[0] == "Unreadable":
        return [("Accepted", False, *rejection), ("Ready", False, *rejection)]
    route = llm_route.parse(body)
    places = {name: (route.namespace, name) for name in route.deployments}
    externals = {name for name in route.externals if (route.namespace, name) in table.externals}
    resolved = _resolved(
        route.namespace,
        [one for one in dict.fromkeys((*places, *route.shadows)) if (route.namespace, one) not in known],
        [name for name in route.externals if name not in externals],
    )
    accepted: Condition = ("Accepted", True, "Accepted", "The names of its models are its own.")
    if rejection is not None:
        accepted = ("Accepted", False, *rejection)
    has_replica = bool(externals) or any(place in ready for place in places.values())
    rolled: list[Condition] = []
    if rollout:
        phase = str(rollout["phase"])
        rolled = [("RolledOut", phase == COMPLETED, phase, str(rollout["message"]))]
    return [accepted, resolved, *rolled, _route_ready(route, rejection, has_replica)]


def _resolved(namespace: str, deployments: list[str], externals: list[str]) -> Condition:
    """By the targets and fallbacks that do not exist."""
    if deployments:
        message = f"There is no LLMDeployment {', '.join(deployments)} in {namespace}."
        return ("ResolvedRefs", False, "DeploymentNotFound", message)
    if externals:
        message = f"There is no LLMExternalBackend {', '.join(externals)} in {namespace}."
        return ("ResolvedRefs", False, "ExternalBackendNotFound", message)
    return ("ResolvedRefs", True, "ResolvedRefs", "Every target exists.")


def _route_ready(route: LLMRoute, rejection: tuple[str, str] | None, has_replica: bool) -> Condition:
    if rejection is not None:
        return ("Ready", False, *rejection)
    if route.kill_switch.enabled:
        what = "The fallbacks answer" if route.kill_switch.mode == "Fallback" else "Requests are refused"
        return ("Ready", False, "KillSwitch", f"{what}: killSwitch.enabled is true.")
    if not has_replica:
        return ("Ready", False, "NoReplica", "No target has a replica that is ready.")
    return ("Ready", True, "Ready", "A target has a replica that is ready.")


def external_conditions(
    body: Body, table: RoutingTable, key_problem: Callable[[LLMExternalBackend], tuple[str, str] | None]
) -> list[Condition]:
    """Those of an LLMExternalBackend. ``key_problem``: the reason why a gateway has no key for it."""
    if (rejection := table.rejected.get(uid_of(body))) is not None:
        return [("Accepted", False, *rejection), ("Ready", False, *rejection)]
    accepted: Condition = ("Accepted", True, "Accepted", "Its spec can be used.")
    problem = key_problem(llm_external_backend.parse(body))
    if problem is not None:
        return [accepted, ("ResolvedRefs", False, *problem), ("Ready", False, *problem)]
    resolved: Condition = ("ResolvedRefs", True, "ResolvedRefs", "Its key is there, if it has one.")
    return [accepted, resolved, ("Ready", True, "Ready", "Requests may be sent to it.")]


def client_conditions(body: Body, table: RoutingTable, now: float) -> list[Condition]:
    """Those of an LLMClient. ``now``: seconds since 1970."""
    if (rejection := table.rejected.get(uid_of(body))) is not None:
        return [("Accepted", False, *rejection), ("Ready", False, *rejection)]
    accepted: Condition = ("Accepted", True, "Accepted", "Its keys are its own.")
    if body["spec"].get("suspended") is True:
        return [accepted, ("Ready", False, "Suspended", "Its keys are refused: suspended is true.")]
    if not body["spec"].get("keyHashes"):
        return [accepted, ("Ready", False, "NoKey", "It has no key.")]
    budget = llm_client.parse(body).budget
    if usage_ledger.is_spent(budget, usage_ledger.saved(body, usage_ledger.period_of(budget, now))):
        message = f"Requests are refused until the {budget.period.lower()} ends, in UTC: its budget is spent."
        return [accepted, ("Ready", False, "BudgetSpent", message)]
    return [accepted, ("Ready", True, "Ready", "Its keys are accepted.")]


def status(
    body: Body, conditions: list[Condition], gateways: Mapping[str, Generations], now: str
) -> dict[str, Any]:
    """The status of an object, all that is not usage."""
    generation, uid = generation_of(body), uid_of(body)
    before = {one.get("type"): one for one in (body.get("status") or {}).get("conditions") or ()}
    return {
        "observedGeneration": generation,
        "conditions": [_condition(one, generation, before.get(one[0]) or {}, now) for one in conditions],
        "gateways": {
            "seen": len(gateways),
            "applied": sum(applied.get(uid, -1) >= generation for applied in gateways.values()),
        },
    }


def _condition(one: Condition, generation: int, before: Mapping[str, Any], now: str) -> dict[str, Any]:
    kind, holds, reason, message = one
    text = "True" if holds else "False"
    since = before.get("lastTransitionTime") if before.get("status") == text else None
    return {
        "type": kind,
        "status": text,
        "reason": reason,
        "message": message[:4096],
        "observedGeneration": generation,
        "lastTransitionTime": since or now,
    }
