"""The condition Routed: whether the Gateways accept our HTTPRoute, and whether the CRDs are installed.

Independent of Ready: the endpoint serves inside the cluster all the same. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire_operator import reports
from quire_operator.observed import Body, Observed
from quire_operator.spec import LLMDeployment
from quire_operator.status import reasons
from quire_operator.status.reasons import ConditionValue

_KINDS = ("HTTPRoute", "InferencePool")


def condition(model: LLMDeployment, observed: Observed) -> ConditionValue | None:
    """Routed; None where the spec names no Gateway."""
    networking = model.spec.networking
    pool = networking.inference_pool
    if networking.http_route is None and (pool is None or not pool.enabled):
        return None
    if missing := [kind for kind in _KINDS if kind in observed.missing]:
        return "False", "MissingCRD", reasons.message("MissingCRD", " and ".join(missing))
    if networking.http_route is None:
        return "True", "PoolMade", "The InferencePool is there for the HTTPRoutes of others."
    route = observed.child("HTTPRoute") or {}
    generation = (route.get("metadata") or {}).get("generation")
    # Conditions for an older generation of the route are ignored. Their update causes no event: the status is
    # polled.
    reported = ((route.get("status") or {}).get("parents")) or ()
    parents = [parent for parent in reported if _is_of(parent, generation)]
    if len(parents) < len(networking.http_route.parent_refs):
        count = f"{len(parents)} of {len(networking.http_route.parent_refs)} Gateways"
        return "Unknown", "AwaitingGateway", f"{count} have said whether they take the HTTPRoute."
    if why := next((why for parent in parents for why in _refusals(parent)), None):
        return "False", "RouteNotAccepted", reasons.message("RouteNotAccepted", why)
    return "True", "RouteAccepted", "Every Gateway takes the HTTPRoute."


def awaits_gateway(status: Mapping[str, Any]) -> bool:
    """Whether Routed may change without an event: these kinds are not watched."""
    return any(
        c.get("type") == "Routed" and c.get("status") != "True" for c in status.get("conditions") or ()
    )


def _is_of(parent: Body, generation: Any) -> bool:
    conditions = parent.get("conditions") or ()
    return all(each.get("observedGeneration") in (None, generation) for each in conditions)


def _refusals(parent: Body) -> Iterator[str]:
    for refusal in parent.get("conditions") or ():
        if refusal.get("type") in ("Accepted", "ResolvedRefs") and refusal.get("status") == "False":
            gateway = (parent.get("parentRef") or {}).get("name")
            yield reports.printable(f"Gateway {gateway}: {refusal.get('reason')}, {refusal.get('message')}")
