"""Ready pods whose canary disagrees with the golden tokens: two replicas that started before the first one's
were kept. One of the two is damaged, and the operator cannot see which, so both are named. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire_operator import names
from quire_operator.observed import Observed, golden_tokens
from quire_operator.reports import GoldenTokens
from quire_operator.status import reasons
from quire_operator.status.pods import Failure, PodState

_REASON = "CanaryMismatch"


def with_disagreements(
    states: Sequence[PodState], observed: Observed, stored_failure: Mapping[str, Any]
) -> list[PodState]:
    """The states, with a failure for each ready pod that answers otherwise than what is kept. A pod that has
    not been asked since the operator's start keeps the `stored_failure` that still holds.
    """
    kept = {one.canary.fingerprint: one for one in golden_tokens(observed)}
    details = {state.name: _disagreement(state, observed, kept, stored_failure) for state in states}
    return [
        replace(state, failure=Failure(reason=_REASON, detail=details[state.name], pod=state.name))
        if details[state.name] and state.ready and state.failure is None
        else state
        for state in states
    ]


def _disagreement(
    state: PodState,
    observed: Observed,
    kept: Mapping[str, GoldenTokens],
    stored_failure: Mapping[str, Any],
) -> str:
    if state.sample is None:
        is_about_it = (stored_failure.get("reason"), stored_failure.get("pod")) == (_REASON, state.name)
        return reasons.detail(_REASON, str(stored_failure.get("message"))) if is_about_it else ""
    said = state.sample.canary
    golden = kept.get(said.fingerprint) if said is not None else None
    if said is None or golden is None or golden.canary.tokens == said.tokens:
        return ""
    where = f"whose tokens are kept in ConfigMap {names.golden_tokens(observed.name)}"
    return f"pod {state.name} has other tokens than pod {golden.pod}, {where}"
