"""Which writes bring the cluster to the desired state: desired manifests and observed objects in, a frozen
Plan out.
"""

from quire_operator.plan.drift import lost_fields, with_applied_hash
from quire_operator.plan.plan import Plan, PodPatch, RevisionPatch
from quire_operator.plan.planner import PlanInput, PlanResult, make_plan
from quire_operator.plan.replica_owner import ReplicaOwner, find_replica_owner
from quire_operator.plan.take_over import FieldPath, managed_fields

__all__ = [
    "FieldPath",
    "Plan",
    "PlanInput",
    "PlanResult",
    "PodPatch",
    "ReplicaOwner",
    "RevisionPatch",
    "find_replica_owner",
    "lost_fields",
    "make_plan",
    "managed_fields",
    "with_applied_hash",
]
