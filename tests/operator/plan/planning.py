"""The Plan for given children and observed objects, with all other inputs of a plan empty."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from quire_operator import spec
from quire_operator.observed import Observed
from quire_operator.plan import Plan, PlanInput, make_plan


def plan_of(desired: Iterable[dict[str, Any]], observed: Observed, **given: Any) -> Plan:
    """`given`: further fields of the PlanInput."""
    model = spec.parse(observed.body)
    result = make_plan(
        PlanInput(model=model, desired=tuple(desired), observed=observed, now=datetime.now(UTC), **given)
    )
    return result.plan
