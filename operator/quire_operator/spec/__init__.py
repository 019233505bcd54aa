"""The API as the operator reads it: an LLMDeployment or AcceleratorProfile manifest, parsed once into frozen
dataclasses.
"""

from quire_operator.spec.llm_deployment import LLMDeployment, parse
from quire_operator.spec.profiles import Profile
from quire_operator.spec.schema import (
    Autoscaling,
    Disruption,
    Drain,
    Engine,
    EnvVar,
    Health,
    KVCache,
    LabelSelector,
    Model,
    Networking,
    NetworkPolicy,
    Observability,
    Peer,
    Resources,
    Rollout,
    Scheduling,
    Security,
    Service,
    Spec,
    Toleration,
)

__all__ = [
    "Autoscaling",
    "Disruption",
    "Drain",
    "Engine",
    "EnvVar",
    "Health",
    "KVCache",
    "LLMDeployment",
    "LabelSelector",
    "Model",
    "NetworkPolicy",
    "Networking",
    "Observability",
    "Peer",
    "Profile",
    "Resources",
    "Rollout",
    "Scheduling",
    "Security",
    "Service",
    "Spec",
    "Toleration",
    "parse",
]
