"""Ready pods whose canary disagrees with the golden tokens: two replicas that started before the first one's
were kept. One of the two is damaged, and nobody can tell which from here, so both are named. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire_operator import names
from quire_operator.observed import Observed, golden_tokens
from quire_operator.status.pods import Failure, PodState


def with_disagreements(states: Sequence[PodState], observed: Observed) -> list[PodState]:
    """The states, with a failure for each ready pod that answers otherwise than what is kept."""
    kept = {one.canary.fingerprint: one for one in golden_tokens(observed)}
    result: list[PodState] = []
    for state in states:
        said = state.sample.canary if state.sample is not None and state.ready else None
        golden = kept.get(said.fingerprint) if said is not None else None
        if said is None or golden is None or golden.canary.tokens == said.tokens or state.failure is not None:
            result.append(state)
            continue
        detail = (
            f"pod {state.name} has other tokens than pod {golden.pod}, whose tokens are kept in ConfigMap "
            f"{names.golden_tokens(observed.name)}"
        )
        failure = Failure(reason="CanaryMismatch", detail=detail, pod=state.name)
        result.append(replace(state, failure=failure))
    return result
