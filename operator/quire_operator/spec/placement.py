"""The part of the spec that says what a replica gets and on which nodes it runs.

A branch of `tree`, in the same terms: a field here is a property of the CRD. Rules that join several fields
are in `placement_rules`; what an AcceleratorProfile is, in `profiles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_operator.spec.bounds import (
    choice,
    default_text,
    items,
    mapping,
    number,
    optional_number,
    required_quantity,
    required_text,
    text,
)
from quire_operator.spec.references import DNS_1123_SUBDOMAIN, LABEL_KEY, LABEL_VALUE

AUTO = "Auto"
RESOURCE_NAME = f"{DNS_1123_SUBDOMAIN}/{LABEL_VALUE}"


@dataclass(frozen=True, kw_only=True)
class GPU:
    resource_name: str = default_text("nvidia.com/gpu", RESOURCE_NAME, 253)
    memory_percent: int = number(1, 98, 90)


@dataclass(frozen=True, kw_only=True)
class ProfileRef:
    name: str = required_text(DNS_1123_SUBDOMAIN, 253)
    memory_percent: int = number(1, 98, 90)


@dataclass(frozen=True, kw_only=True)
class Resources:
    cpu: str = required_quantity()
    memory: str = required_quantity()
    gpu: GPU | None = None
    profile_ref: ProfileRef | None = None
    shared_memory: str = field(default=AUTO, metadata={"quantity": True, "or": AUTO})

    @property
    def accelerator(self) -> GPU | ProfileRef | None:
        """What is asked for besides CPU and memory; None where the model runs on the CPU."""
        return self.gpu or self.profile_ref


@dataclass(frozen=True, kw_only=True)
class Toleration:
    key: str = text(LABEL_KEY, 317)
    operator: str = choice("Equal", "Exists")
    value: str = text(LABEL_VALUE, 63)
    effect: str = field(default="", metadata={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]})
    toleration_seconds: int | None = optional_number(0, 31_536_000)


@dataclass(frozen=True, kw_only=True)
class Spot:
    enabled: bool = False
    fallback_to_on_demand: bool = True


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    node_selector: Mapping[str, str] = mapping(LABEL_VALUE, 63)
    tolerations: tuple[Toleration, ...] = items(32)
    affinity: Mapping[str, Any] = field(default_factory=dict)
    priority_class_name: str = text(DNS_1123_SUBDOMAIN, 253)
    runtime_class_name: str = text(DNS_1123_SUBDOMAIN, 253)
    scheduler_name: str = text(DNS_1123_SUBDOMAIN, 253)
    topology_spread: str = choice("Auto", "None")
    queue_name: str = text(LABEL_VALUE, 63)
    spot: Spot = Spot()
