"""Who says how many replicas the Deployment has, and so what we apply: a number, or nothing.

Called by `make_plan`. Server-side apply drops a field when the last manager that applied it leaves it out,
and the API server then puts its default there: an endpoint of six pods would fall to one when an autoscaler
is switched on. So the number that lives is applied until the managed fields name another owner of it (an
autoscaler becomes one with its first write), and only then left out. Pure; knows no autoscaler's fields.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from quire_operator import names
from quire_operator.observed import Body, Observed, claims_on_replicas
from quire_operator.spec import LLMDeployment

Manifest = dict[str, Any]


class Decider(Enum):
    """Who decides about the number of pods."""

    SPEC = "spec"  # the spec gives the number
    HPA = "hpa"  # our own autoscaler, which never starts from 0
    OTHERS = "others"  # KEDA, which may say 0, or an autoscaler of the user's that is told of in the spec
    RIVAL = "rival"  # an autoscaler that the spec knows nothing of: fighting it would start and kill pods


def decider(model: LLMDeployment, observed: Observed) -> Decider:
    """Who decides now. While suspended nobody else does."""
    if model.replicas == 0:
        return Decider.SPEC
    if model.autoscaler:
        return Decider.HPA if model.autoscaler == "HPA" else Decider.OTHERS
    return Decider.RIVAL if observed.rivals or observed.made_by_keda else Decider.SPEC


def replicas(wanted: int, by: Decider, live: Body | None) -> int | None:
    """What to apply as spec.replicas of the Deployment; None to leave it out.

    `wanted`: what the spec says, the least where an autoscaler decides. `live`: the Deployment, if it exists.
    """
    if live is None or by is Decider.SPEC:
        return wanted
    count = live_replicas(live)
    if count == 0 and by is not Decider.HPA and not claims_on_replicas(live):
        # Somebody scaled to 0 through /scale: the API server then forgets every owner, for a Scale leaves a 0
        # out. We own nothing that an apply without it could drop.
        return None
    if is_owned_by_others(live) and not (by is Decider.HPA and count == 0):
        return None
    return wanted if by is Decider.RIVAL else max(count, wanted)


def settled(manifest: Manifest, by: Decider, live: Body | None) -> Manifest:
    """The manifest of the Deployment with the number that is to be applied.

    A number that was read is applied only to the object from which it was read: were an autoscaler faster,
    its number would be undone. The API server answers 409 then, and the next look sees the new owner.
    """
    if by is Decider.SPEC:
        return manifest
    number = replicas(int(manifest["spec"]["replicas"]), by, live)
    result = {**manifest, "spec": {k: v for k, v in manifest["spec"].items() if k != "replicas"}}
    if number is not None:
        result["spec"]["replicas"] = number
        if live is not None:
            result["metadata"] = {
                **manifest["metadata"],
                "resourceVersion": live["metadata"]["resourceVersion"],
            }
    return result


def live_replicas(live: Body) -> int:
    """The number that a Deployment has; the API server's default where none is there."""
    return int((live.get("spec") or {}).get("replicas", 1))


def is_owned_by_others(live: Body) -> bool:
    """Whether anybody but our own applies owns the number: then it stays when we leave it out."""
    ours = (names.FIELD_MANAGER, "Apply")
    return any((claim.get("manager"), claim.get("operation")) != ours for claim in claims_on_replicas(live))
