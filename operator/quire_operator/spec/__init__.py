"""What a user asks for: an LLMDeployment as the API server gives it, read once into frozen dataclasses.

`parse` is called by reconcile and by `render`. The CRD has checked an object before we see it, yet everything
is checked again: `render` has no API server, and an older CRD may be installed. Knows nothing of children.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire_operator import names
from quire_operator.errors import SpecError
from quire_operator.spec import reader, rules
from quire_operator.spec.references import EnvVar
from quire_operator.spec.replicas import Autoscaling, Disruption, Rollout
from quire_operator.spec.tree import (
    Drain,
    Engine,
    Health,
    KVCache,
    LabelSelector,
    Model,
    Networking,
    NetworkPolicy,
    Observability,
    Peer,
    Resources,
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
    "Resources",
    "Rollout",
    "Scheduling",
    "Security",
    "Service",
    "Spec",
    "Toleration",
    "parse",
]

_HASH_LENGTH = 10


@dataclass(frozen=True, kw_only=True)
class LLMDeployment:
    """One object of the API. `uid` is empty and `generation` 0 for a manifest that is in no cluster."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Spec

    @property
    def replicas(self) -> int:
        """How many pods are wanted: none while suspended, one when the user says nothing; where an autoscaler
        decides, how many at least.
        """
        if self.spec.suspend:
            return 0
        if self.spec.autoscaling is not None:
            return self.spec.autoscaling.min_replicas
        return 1 if self.spec.replicas is None else self.spec.replicas

    @property
    def autoscaler(self) -> str:
        """Who decides about the number of pods: HPA, KEDA or External; empty where the spec gives it, or none
        are to run.
        """
        scaling = self.spec.autoscaling
        if scaling is None or self.spec.suspend:
            return ""
        if scaling.backend != "Auto":
            return scaling.backend
        return "HPA" if scaling.idle is None and scaling.fallback is None else "KEDA"

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's names in the OpenAI API, the first of them the one that answers carry."""
        first = self.spec.model.served_name or self.name
        return tuple(dict.fromkeys((first, *self.spec.model.aliases)))

    @property
    def service_account_name(self) -> str:
        """The user's ServiceAccount, or our own that has no rights."""
        return self.spec.security.service_account_name or self.name

    @property
    def model_dir(self) -> str:
        """Where the model is on its volume: where the user put it, or where it is downloaded to."""
        claim, cache = self.spec.model.source.pvc, self.spec.cache
        if claim is not None:
            return claim.path
        is_shared = cache is not None and cache.is_shared
        return f"{names.FETCHED_DIR}-{self.content}" if is_shared else names.FETCHED_DIR

    @property
    def content(self) -> str:
        """A name for what is to be on a shared claim: made from the source, and from the claim if that is the
        user's.
        """
        source, cache = self.spec.model.source, self.spec.cache
        parts = (source.uri, source.endpoint, cache.existing_claim if cache is not None else "")
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_HASH_LENGTH]

    @property
    def claim_name(self) -> str:
        """The shared claim: the user's, or our own."""
        cache = self.spec.cache
        existing = cache.existing_claim if cache is not None else ""
        return existing or f"{self.name}-model-{self.content}"

    @property
    def download_name(self) -> str:
        """The Job that fills the shared claim, and its NetworkPolicy."""
        return f"{self.name}-{names.FETCHER}-{self.content}"

    @property
    def url(self) -> str:
        """The endpoint's base URL inside the cluster."""
        port = self.spec.networking.service.port
        return f"http://{self.name}.{self.namespace}.svc{'' if port == 80 else f':{port}'}/v1"


def parse(body: Mapping[str, Any]) -> LLMDeployment:
    """Read and check one object; SpecError names the first field that cannot be used and what to do."""
    if body.get("apiVersion") != names.API_VERSION or body.get("kind") != names.KIND:
        raise SpecError("kind", f"expected apiVersion {names.API_VERSION}, kind {names.KIND}")
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping):
        raise SpecError("metadata", "required: give at least a name")
    name = metadata.get("name")
    rules.check_name(name)
    spec = reader.read(Spec, body.get("spec"), "spec")
    rules.check(spec)
    if spec.cache is not None and spec.cache.is_of_one_node and spec.rollout.strategy == "Auto":
        # An additional pod on another node would wait for the claim for ever.
        spec = replace(spec, rollout=replace(spec.rollout, strategy="InPlace"))
    return LLMDeployment(
        name=str(name),
        namespace=str(metadata.get("namespace") or "default"),
        uid=str(metadata.get("uid") or ""),
        generation=int(metadata.get("generation") or 0),
        spec=spec,
    )
