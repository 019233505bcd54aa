"""Surge pods that a ResourceQuota refuses, and whether the end of an old pod would make room for them.

A refused pod does not exist, so no pod reports what it lacks. The Deployment's condition ReplicaFailure does,
in the words of the API server's quota admission. Pure; knows neither the quota itself nor its other users.
"""

from __future__ import annotations

import re
from fractions import Fraction

from quire_operator import quantity
from quire_operator.errors import QuantityError
from quire_operator.observed import Body, Observed, old_pods, replica_failure

_EXCEEDED = re.compile(
    r"exceeded quota: [^,]+, requested: (?P<requested>\S+), used: (?P<used>\S+), limited: (?P<limited>\S+)"
)


def is_exceeded(message: str) -> bool:
    """Whether a quota is used up, by the API server's refusal of an object."""
    return "exceeded quota" in message


def refused_surge(observed: Observed) -> Body:
    """The condition ReplicaFailure where it reports that a quota refuses a pod of the newest revision, for
    which the end of an old pod would make room; empty otherwise.
    """
    failure = replica_failure(observed.workload)
    message = str(failure.get("message", ""))
    has_room = is_exceeded(message) and any(makes_room(pod, message) for pod in old_pods(observed))
    return failure if has_room else {}


def makes_room(pod: Body, message: str) -> bool:
    """Whether the pod that a quota refused with `message` would be admitted after the end of `pod`. True
    where the message does not tell.
    """
    found = _EXCEEDED.search(message)
    if found is None:
        return True
    requested, used, limited = (_amounts(found[part]) for part in ("requested", "used", "limited"))
    return all(_fits(requested[name], used, limited, name, pod) for name in requested)


def _fits(requested: str, used: dict[str, str], limited: dict[str, str], name: str, pod: Body) -> bool:
    try:
        free = quantity.parse(limited[name]) - quantity.parse(used[name]) + _use(pod["spec"], name)
        return quantity.parse(requested) <= free
    except (KeyError, QuantityError):
        return True


def _amounts(text: str) -> dict[str, str]:
    """`requests.memory=2Gi,pods=1` by name."""
    return {name: amount for name, _, amount in (part.partition("=") for part in text.split(","))}


def _use(spec: Body, name: str) -> Fraction:
    """What a pod counts for in a quota. Raises KeyError for what a pod does not tell."""
    if name in ("pods", "count/pods"):
        return Fraction(1)
    kind, _, resource = name.partition(".")
    if not resource:
        kind, resource = "requests", name  # cpu and memory stand for requests.cpu and requests.memory
    if kind not in ("requests", "limits"):
        raise KeyError(name)
    beside = Fraction(0)  # init containers that are restarted run on beside the later ones
    most = Fraction(0)
    for one in spec.get("initContainers") or ():
        amount = _amount(one, kind, resource)
        if one.get("restartPolicy") == "Always":
            beside += amount
            most = max(most, beside)
        else:
            most = max(most, beside + amount)
    running = sum((_amount(one, kind, resource) for one in spec.get("containers") or ()), beside)
    return max(running, most)


def _amount(container: Body, kind: str, resource: str) -> Fraction:
    amounts = (container.get("resources") or {}).get(kind) or {}
    return quantity.parse(str(amounts.get(resource, "0")))
