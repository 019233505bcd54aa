"""The Lease by which a gateway says that requests wait for a model without pods, and which models can be so.

The operator starts a pod for as long as it is renewed. Pure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from quire_gateway.replicas import LABEL_MODEL

LABEL_ROLE = "serving.quire.dev/role"
LABEL_NAMESPACE = "serving.quire.dev/namespace"
ROLE = "demand"
RENEW_SECONDS = 10.0
_DURATION_SECONDS = 30
#: Requests that run together on one replica, where an LLMDeployment does not say.
DEFAULT_SLOTS, DEFAULT_GPU_SLOTS = 64, 256


def lease(place: tuple[str, str], renewed: str) -> dict[str, Any]:
    """The Lease for the LLMDeployment of a namespace and a name."""
    namespace, name = place
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": lease_name(place),
            "labels": {LABEL_ROLE: ROLE, LABEL_NAMESPACE: namespace, LABEL_MODEL: name},
        },
        "spec": {
            "holderIdentity": "quire-gateway",
            "leaseDurationSeconds": _DURATION_SECONDS,
            "renewTime": renewed,
        },
    }


def lease_name(place: tuple[str, str]) -> str:
    """Two models have one name only where they are the same: no namespace has a dot."""
    return f"quire-demand-{place[0]}.{place[1]}"


def timestamp() -> str:
    """Now, as a Lease has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())


def scales_to_zero(deployment: Mapping[str, Any] | None) -> bool:
    """Whether the operator stops the pods of this LLMDeployment while there are no requests, or for another
    one that shares its accelerator, and starts one for the Lease. KEDA has other ways.
    """
    spec = (deployment or {}).get("spec") or {}
    if spec.get("sharing"):
        return not spec.get("suspend") and spec.get("replicas") != 0
    scaling = spec.get("autoscaling") or {}
    idle = scaling.get("idle")
    if spec.get("suspend") or scaling.get("backend") in ("KEDA", "External") or scaling.get("fallback"):
        return False
    if idle is not None and idle.get("activator"):
        return False
    return idle is not None or scaling.get("minReplicas") == 0


def slots(deployment: Mapping[str, Any] | None) -> int:
    """How many requests one of its replicas runs together."""
    spec = (deployment or {}).get("spec") or {}
    engine, resources = spec.get("engine") or {}, spec.get("resources") or {}
    on_gpu = resources.get("gpu") is not None or resources.get("profileRef") is not None
    return int(engine.get("maxNumSeqs") or (DEFAULT_GPU_SLOTS if on_gpu else DEFAULT_SLOTS))


def seconds_until_loaded(deployment: Mapping[str, Any] | None, now: float) -> int | None:
    """By the status of an LLMDeployment: what is left of a load that goes on, else what the last one took,
    after its turn where it shares an accelerator; None where neither is known. `now`: in Unix time.
    """
    status = (deployment or {}).get("status") or {}
    model = status.get("model") or {}
    for found in (model.get("etaSeconds"), model.get("lastLoadSeconds")):
        if isinstance(found, int) and found >= 0:
            return max(1, found + _seconds_until_turn(status.get("sharing") or {}, now))
    return None


def _seconds_until_turn(sharing: Mapping[str, Any], now: float) -> int:
    try:
        turn = datetime.fromisoformat(str(sharing.get("turnTime"))).timestamp()
    except ValueError:
        return 0
    return max(0, round(turn - now)) if sharing.get("state") == "Waiting" else 0
