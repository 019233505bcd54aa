"""Whether Gateways lead to the endpoint: the condition Routed.

Called by `status.of`. Mirrors what the Gateways say of our HTTPRoute, and tells of CRDs that are not there.
What serves inside the cluster is Ready all the same. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire_operator import reports
from quire_operator.observed import Body, Observed
from quire_operator.spec import LLMDeployment
from quire_operator.status import reasons

Decided = tuple[str, str, str]  # status, reason, message

_KINDS = ("HTTPRoute", "InferencePool")


def condition(model: LLMDeployment, observed: Observed) -> Decided | None:
    """Routed; None where no Gateway is asked for."""
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
    # What a Gateway said before the route's last edit says nothing, and no event tells when it says more.
    told_of = ((route.get("status") or {}).get("parents")) or ()
    parents = [parent for parent in told_of if _is_of(parent, generation)]
    if len(parents) < len(networking.http_route.parent_refs):
        told = f"{len(parents)} of {len(networking.http_route.parent_refs)} Gateways"
        return "Unknown", "AwaitingGateway", f"{told} have said whether they take the HTTPRoute."
    if why := next((why for parent in parents for why in _refusals(parent)), None):
        return "False", "RouteNotAccepted", reasons.message("RouteNotAccepted", why)
    return "True", "RouteAccepted", "Every Gateway takes the HTTPRoute."


def awaits_others(status: Mapping[str, Any]) -> bool:
    """Whether Routed may change without an event: no watch tells of these kinds."""
    return any(
        c.get("type") == "Routed" and c.get("status") != "True" for c in status.get("conditions") or ()
    )


def _is_of(parent: Body, generation: Any) -> bool:
    conditions = parent.get("conditions") or ()
    return all(each.get("observedGeneration") in (None, generation) for each in conditions)


def _refusals(parent: Body) -> Iterator[str]:
    for told in parent.get("conditions") or ():
        if told.get("type") in ("Accepted", "ResolvedRefs") and told.get("status") == "False":
            gateway = (parent.get("parentRef") or {}).get("name")
            yield reports.printable(f"Gateway {gateway}: {told.get('reason')}, {told.get('message')}")
