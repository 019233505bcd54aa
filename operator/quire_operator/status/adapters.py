"""status.adapters, and the condition AdaptersReady: which of the adapters that the spec names the pods answer
with.

The model serves without them, so the condition is no part of Ready. What pods report is believed of
themselves alone. Pure; decides about no pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire_operator.reports import AdapterReport
from quire_operator.spec import LLMDeployment
from quire_operator.status import reasons
from quire_operator.status.pods import PodState
from quire_operator.status.reasons import ConditionValue

_READY, _PENDING = "Ready", "Pending"
# The state of an adapter is the first of these that a pod has.
_ORDER = ("Failed", "Unloaded", "Fetching", "Loading", _PENDING, _READY)
# Progress is rounded down to a multiple of so many percent: each step is a write of the status.
_STEP = 5


def summary(model: LLMDeployment, states: Sequence[PodState], old: Sequence[Any]) -> list[dict[str, Any]]:
    """One entry for each adapter of the spec, in its order. `states`: the pods that stay; `old`: the stored
    entries, which hold while a ready pod has not been asked since the operator's start.
    """
    stored = {entry.get("name"): dict(entry) for entry in old if isinstance(entry, Mapping)}
    is_unknown = any(state.ready and state.sample is None for state in states)
    return [
        stored[adapter.name]
        if is_unknown and adapter.name in stored
        else _entry(adapter.name, sorted(states, key=lambda state: state.name))
        for adapter in model.spec.adapters
    ]


def condition(model: LLMDeployment, entries: Sequence[Mapping[str, Any]]) -> ConditionValue | None:
    """AdaptersReady; None where the spec names none. `entries`: of `summary`."""
    if not entries:
        return None
    if model.replicas == 0 or not any(entry.get("replicas") for entry in entries):
        return "Unknown", "NoPods", "There are no pods to load adapters."
    failed = [entry for entry in entries if entry["state"] == "Failed"]
    if failed:
        first = f"{failed[0]['name']}: {failed[0].get('message', '')}"
        others = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        return "False", "AdapterFailed", reasons.message("AdapterFailed", f"{first.rstrip('.')}{others}")
    ready = sum(entry["state"] == _READY for entry in entries)
    count = f"{ready} of {len(entries)} adapters are ready in all pods."
    if ready == len(entries):
        return "True", "AllAdaptersReady", count
    return "False", "AdaptersPending", count


def _entry(name: str, states: Sequence[PodState]) -> dict[str, Any]:
    said = {state.name: report for state in states if (report := _report(name, state)) is not None}
    of_pods = [said[state.name].state if state.name in said else _PENDING for state in states]
    worst = next((state for state in _ORDER if state in of_pods), _PENDING)
    result: dict[str, Any] = {
        "name": name,
        "state": worst,
        "readyReplicas": of_pods.count(_READY),
        "replicas": len(states),
    }
    revisions = {report.revision for report in said.values() if report.revision}
    if len(revisions) == 1:
        result["revision"] = revisions.pop()
    if worst == "Fetching" and (shares := _shares(said.values())):
        result["progress"] = f"{min(shares) // _STEP * _STEP}%"
    if worst in ("Failed", "Unloaded"):
        pod, report = next((pod, one) for pod, one in said.items() if one.state == worst)
        result["message"] = f"pod {pod}: {report.message or 'it does not say why'}"
    return result


def _report(name: str, state: PodState) -> AdapterReport | None:
    listed = () if state.sample is None else state.sample.adapters
    return next((report for report in listed if report.name == name), None)


def _shares(said: Iterable[AdapterReport]) -> list[int]:
    """How much each pod that downloads has, in percent."""
    known = [report for report in said if report.state == "Fetching" and report.total_bytes]
    return [100 * report.loaded_bytes // report.total_bytes for report in known]
