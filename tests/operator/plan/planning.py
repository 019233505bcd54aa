"""What is planned for given children and observed objects, with all other inputs empty."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from quire_operator import spec
from quire_operator.observed import Observed, Ref
from quire_operator.plan import Plan, PlanInput, make_plan, strategy
from tests.operator.status.objects import model_body, replica_set

Body = dict[str, Any]


def plan_of(desired: Iterable[dict[str, Any]], observed: Observed, **given: Any) -> Plan:
    """`given`: further fields of the PlanInput."""
    model = spec.parse(observed.body)
    result = make_plan(
        PlanInput(model=model, desired=tuple(desired), observed=observed, now=datetime.now(UTC), **given)
    )
    return result.plan


def goes_in_place(of: Body, *of_pods: Body, now: datetime, **rollout: Any) -> bool:
    """Whether a rollout of two replicas by strategy Auto goes on in place."""
    observed = Observed(
        body=model_body(),
        children={Ref("Deployment", "m"): of},
        replica_sets=(replica_set("rs1", 1), replica_set("rs2", 2)),
        pods=of_pods,
    )
    model = spec.parse(model_body(replicas=2, rollout={"surgeWaitSeconds": 60, **rollout}))
    return strategy.falls_back_to_in_place(model, observed, now)
