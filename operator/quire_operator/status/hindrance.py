"""What keeps the operator from writing what it would write, told before it tries.

Called by reconcile. What the API server refuses later is told by reconcile itself. Pure.
"""

from __future__ import annotations

from quire_operator import reports
from quire_operator.observed import Observed, ref
from quire_operator.status.pods import Failure


def ownership_conflict(observed: Observed) -> Failure | None:
    """The problem of names that somebody else has."""
    told = {ref(rival) for rival in observed.rivals}  # as ConflictingAutoscaler, which hinders no pod
    foreign = [target for target in observed.foreign if target not in told]
    if not foreign:
        return None
    taken = ", ".join(f"{target} in namespace {observed.namespace}" for target in foreign)
    return Failure(reason="OwnershipConflict", detail=taken)


def missing_rights(observed: Observed) -> Failure | None:
    """The problem of kinds that the spec asks for and that the operator may not read."""
    if not observed.forbidden:
        return None
    return Failure(reason="MissingRights", detail=reports.printable("; ".join(observed.forbidden.values())))
