"""The part of the spec that says how many pods there are and how they come and go.

A branch of `tree`, in the same terms: a field here is a property of the CRD. Rules that join several fields
are in `scaling_rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire_operator.spec.bounds import choice, items, number, optional_number, text

IDENTIFIER = r"[A-Za-z0-9._:-]*"


@dataclass(frozen=True, kw_only=True)
class Metric:
    type: str = field(
        metadata={"enum": ["QueueDepth", "RunningRequests", "KVCacheUtilization", "GPUUtilization"]}
    )
    target_per_replica: int | None = optional_number(1, 100_000)


@dataclass(frozen=True, kw_only=True)
class ScaleUp:
    stabilization_window_seconds: int = number(0, 3600, 0)
    period_seconds: int | None = optional_number(1, 1800)
    pods: int = number(1, 1000, 1)
    percent: int = number(0, 1000, 50)


@dataclass(frozen=True, kw_only=True)
class ScaleDown:
    stabilization_window_seconds: int = number(0, 3600, 300)
    period_seconds: int = number(1, 1800, 60)
    pods: int = number(1, 1000, 1)


@dataclass(frozen=True, kw_only=True)
class Behavior:
    scale_up: ScaleUp = ScaleUp()
    scale_down: ScaleDown = ScaleDown()


@dataclass(frozen=True, kw_only=True)
class Idle:
    replicas: int = number(0, 999, 0)
    after_seconds: int = number(1, 86_400, 1800)


@dataclass(frozen=True, kw_only=True)
class Fallback:
    replicas: int = field(metadata={"minimum": 1, "maximum": 1000})
    failure_threshold: int = number(1, 100, 3)


@dataclass(frozen=True, kw_only=True)
class Autoscaling:
    max_replicas: int = field(metadata={"minimum": 1, "maximum": 1000})
    min_replicas: int = number(1, 1000, 1)
    backend: str = choice("Auto", "HPA", "KEDA", "External")
    metrics: tuple[Metric, ...] = items(4)
    behavior: Behavior = Behavior()
    idle: Idle | None = None
    fallback: Fallback | None = None


@dataclass(frozen=True, kw_only=True)
class Disruption:
    max_unavailable: int = number(1, 1000, 1)
    protect_while_loading: bool = True


@dataclass(frozen=True, kw_only=True)
class Rollout:
    strategy: str = choice("Auto", "Surge", "InPlace", "Recreate")
    max_surge: int = number(0, 100, 1)
    max_unavailable: int = number(0, 100, 0)
    surge_wait_seconds: int = number(10, 3600, 120)
    min_ready_seconds: int = number(0, 300, 0)
    restart_id: str = text(IDENTIFIER, 64)
    paused: bool = False
    auto_rollback: bool = False
    adopt_operator_defaults: str = choice("OnSpecChange", "Always")
