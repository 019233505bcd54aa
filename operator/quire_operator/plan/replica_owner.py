"""Which controller owns the Deployment's spec.replicas, and so what the operator applies: a number, or
nothing.

Server-side apply removes a field when the last manager that applied it leaves it out, and the API server then
sets the default: an endpoint of six pods would fall to one when an autoscaler is switched on. So the live
number is applied until the managed fields name another owner (an autoscaler becomes one with its first
write), and only then left out. Pure; knows no autoscaler's fields.
"""

from __future__ import annotations

from enum import Enum

from quire_operator import names
from quire_operator.observed import Body, Observed, managers_of_replicas
from quire_operator.resources import Manifest
from quire_operator.spec import LLMDeployment


class ReplicaOwner(Enum):
    """Who decides the number of replicas."""

    SPEC = "spec"  # the LLMDeployment's spec
    IDLE = "idle"  # the operator, which keeps no pod while there are no requests
    HPA = "hpa"  # our own HorizontalPodAutoscaler, which never scales up from 0
    EXTERNAL = "external"  # KEDA, which may scale to 0, or the user's autoscaler (backend: External)
    UNDECLARED = "undeclared"  # an autoscaler that the spec does not mention: overriding it would flap


def find_replica_owner(model: LLMDeployment, observed: Observed, *, is_idle: bool = False) -> ReplicaOwner:
    """The owner now; the spec while the LLMDeployment is suspended. `is_idle`: no pod is to run for lack of
    requests.
    """
    if model.replicas == 0 or model.spec.sharing is not None:
        return ReplicaOwner.SPEC  # of a shared accelerator: one or none, whatever others write
    if is_idle:
        return ReplicaOwner.IDLE
    if model.autoscaler:
        return ReplicaOwner.HPA if model.autoscaler == "HPA" else ReplicaOwner.EXTERNAL
    return (
        ReplicaOwner.UNDECLARED
        if observed.foreign_autoscalers or observed.keda_autoscaler
        else ReplicaOwner.SPEC
    )


def replicas_to_apply(wanted: int, owner: ReplicaOwner, live: Body | None) -> int | None:
    """What to apply as spec.replicas of the Deployment; None to leave it out.

    `wanted`: the spec's number, the minimum where an autoscaler decides. `live`: the Deployment, if it
    exists.
    """
    if live is None or owner is ReplicaOwner.SPEC:
        return wanted
    if owner is ReplicaOwner.IDLE:
        return 0
    count = live_replicas(live)
    if count == 0 and owner is not ReplicaOwner.HPA and not managers_of_replicas(live):
        # Scaled to 0 through /scale, which removes every owner of the field (a Scale of 0 omits it). We own
        # nothing that an apply without the field could remove.
        return None
    if has_other_owner(live) and not (owner is ReplicaOwner.HPA and count == 0):
        return None
    return wanted if owner is ReplicaOwner.UNDECLARED else max(count, wanted)


def with_replicas(manifest: Manifest, owner: ReplicaOwner, live: Body | None) -> Manifest:
    """The Deployment's manifest with the number of replicas to apply.

    A number that was read is applied with the resourceVersion it was read at: an autoscaler that wrote in
    between makes the API server answer 409 instead of having its number overwritten, and the next reconcile
    sees it.
    """
    if owner is ReplicaOwner.SPEC:
        return manifest
    number = replicas_to_apply(int(manifest["spec"]["replicas"]), owner, live)
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
    """The number in the live Deployment; the API server's default where it has none."""
    return int((live.get("spec") or {}).get("replicas", 1))


def has_other_owner(live: Body) -> bool:
    """Whether another manager than our own apply owns the number: then it stays when we leave it out."""
    ours = (names.FIELD_MANAGER, "Apply")
    return any((claim.get("manager"), claim.get("operation")) != ours for claim in managers_of_replicas(live))
