"""The status of an LLMDeployment, computed from what was observed, and what changed between two statuses."""

from quire_operator.status.accelerator_fit import RequestedAccelerator
from quire_operator.status.cost import per_hour as cost_per_hour
from quire_operator.status.model_cache import pods_with_corrupt_model
from quire_operator.status.pods import Failure
from quire_operator.status.preflight import missing_rights, missing_workload, ownership_conflict
from quire_operator.status.scaling import pod_measurements
from quire_operator.status.sharing import TurnState
from quire_operator.status.spot import condition as drain_fits_notice
from quire_operator.status.status import (
    Status,
    changes_without_event,
    compute_refused_status,
    compute_status,
    has_failing_pods,
    is_ready,
    rollout_failure,
    timestamp,
)

__all__ = [
    "Failure",
    "RequestedAccelerator",
    "Status",
    "TurnState",
    "changes_without_event",
    "compute_refused_status",
    "compute_status",
    "cost_per_hour",
    "drain_fits_notice",
    "has_failing_pods",
    "is_ready",
    "missing_rights",
    "missing_workload",
    "ownership_conflict",
    "pod_measurements",
    "pods_with_corrupt_model",
    "rollout_failure",
    "timestamp",
]
