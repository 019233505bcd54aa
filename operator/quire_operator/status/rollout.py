"""How a rollout goes: the Deployment's numbers, what its strategy came to, which revision serves.

Called by `status.of` and by reconcile. Pure; decides about no pod.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire_operator import names
from quire_operator.observed import Body, Observed, awaits_room_since, is_replaced_in_place, surging_pods
from quire_operator.spec import LLMDeployment
from quire_operator.status.pods import Failure, PodState
from quire_operator.status.reasons import REASONS, STALLED_AFTER_FAILURES


def waiting_to_surge(model: LLMDeployment, observed: Observed, states: Sequence[PodState]) -> Failure | None:
    """Why the additional pod finds no room, where Auto will not wait for ever: no failure, then."""
    if model.spec.rollout.strategy != "Auto" or not model.spec.rollout.max_surge:
        return None
    surging = {str(pod["metadata"]["name"]) for pod in surging_pods(observed) if awaits_room_since(pod)}
    return next((s.failure for s in states if s.name in surging and s.failure is not None), None)


def summary(model: LLMDeployment, deployment: Body, newer: str) -> dict[str, Any]:
    """status.rollout and the revisions; empty before there is a Deployment."""
    if not deployment:
        return {}
    annotations = (deployment.get("metadata") or {}).get("annotations") or {}
    told: dict[str, Any] = {"rollout": {"strategyInEffect": _strategy(model, deployment)}}
    if revision := annotations.get(names.ANNOTATION_RENDER_REVISION):
        told["renderRevision"] = str(revision)
    return told | ({"availableRenderRevision": newer} if newer else {})


def has_given_up_to_surge(model: LLMDeployment, deployment: Body | None) -> bool:
    """Whether Auto goes on in place."""
    rollout = model.spec.rollout
    is_auto = rollout.strategy == "Auto" and rollout.max_surge > 0
    return is_auto and deployment is not None and is_replaced_in_place(deployment)


def final_failure(states: Sequence[PodState]) -> Failure | None:
    """Of a pod of the newest revision: the same end again, which no retry will help."""
    failures = [state.failure for state in states if state.current and state.failure is not None]
    return next((failure for failure in failures if is_final(failure)), None)


def is_final(failure: Failure) -> bool:
    """Whether no retry helps until something changes."""
    is_repeated = failure.exit_code is not None and failure.count >= STALLED_AFTER_FAILURES
    return REASONS[failure.reason].final and is_repeated


def _strategy(model: LLMDeployment, deployment: Mapping[str, Any]) -> str:
    strategy = (deployment.get("spec") or {}).get("strategy") or {}
    if strategy.get("type") == "Recreate":
        return "Recreate"
    return "InPlace" if is_replaced_in_place(deployment) else "Surge"
