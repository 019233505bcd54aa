"""An LLMDeployment as it is stored, parsed once into a frozen dataclass.

The CRD has validated the object before the operator sees it. It is validated again because `render` has no
API server and an older CRD may be installed. Knows nothing of children.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire_operator import names
from quire_operator.errors import SpecError
from quire_operator.spec import reader, validation
from quire_operator.spec.schema import (
    Autoscaling,
    Decode,
    Disaggregation,
    Idle,
    Metric,
    Prefill,
    RoleParallelism,
    RoleResources,
    Spec,
)

_HASH_LENGTH = 10
_DRAIN_SECONDS = 120
# Beyond the drain: the cut requests get their final event, and the processes end.
_GRACE_MARGIN_SECONDS = 5


@dataclass(frozen=True, kw_only=True)
class LLMDeployment:
    """`uid` is empty and `generation` 0 for a manifest that is not stored in a cluster. `role`: that of the
    pods which `spec` describes, prefill only in what `prefill` returns.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Spec
    role: str = names.ROLE_LEADER

    @property
    def workload_name(self) -> str:
        """Name of the Deployment, and of what belongs to its pods."""
        return names.workload(self.name, self.role)

    @property
    def prefill(self) -> LLMDeployment | None:
        """The same with the prefill pods in place of those that clients talk to; None where it has none."""
        roles = self.spec.disaggregation
        if roles is None:
            return None
        spec = _of_role(self.spec, roles.prefill)
        spec = replace(
            spec,
            replicas=roles.prefill.replicas,
            autoscaling=_autoscaling(roles.prefill, self.spec.autoscaling),
            suspend=self.replicas == 0,
        )
        return replace(self, spec=spec, role=names.ROLE_PREFILL)

    @property
    def roles(self) -> tuple[LLMDeployment, ...]:
        """The LLMDeployment by the role of its pods, those that clients talk to first."""
        return (self,) if self.prefill is None else (self, self.prefill)

    @property
    def replicas(self) -> int:
        """The number of pods that the spec gives: 0 while suspended, 1 by default, the minimum with an
        autoscaler.
        """
        if self.spec.suspend:
            return 0
        if self.spec.autoscaling is not None:
            return self.spec.autoscaling.min_replicas
        return self.spec.replicas

    @property
    def is_grouped(self) -> bool:
        """Whether a replica is a group of pods on several nodes, not one pod."""
        return self.spec.parallelism.nodes > 1

    @property
    def autoscaler(self) -> str:
        """What decides the number of pods: HPA, KEDA or External; empty where the spec does, or while
        suspended.
        """
        scaling = self.spec.autoscaling
        if scaling is None or self.spec.suspend:
            return ""
        if scaling.backend != "Auto":
            return scaling.backend
        return "KEDA" if validation.needs_keda(scaling) else "HPA"

    @property
    def scales_to_zero(self) -> bool:
        """Whether the operator itself stops all pods while there are no requests."""
        scaling = self.spec.autoscaling
        return scaling is not None and scaling.idle is not None and self.autoscaler == "HPA"

    @property
    def drain_timeout_seconds(self) -> int:
        """How long the requests of a deleted pod may take before they are cancelled. Where the spec does not
        say, the drain of a pod on a spot node ends before the node does.
        """
        drain, spot = self.spec.drain, self.spec.scheduling.spot
        if drain.timeout_seconds is not None:
            return drain.timeout_seconds
        left = spot.notice_seconds - drain.pre_stop_seconds - _GRACE_MARGIN_SECONDS
        return max(1, min(_DRAIN_SECONDS, left)) if spot.enabled else _DRAIN_SECONDS

    @property
    def termination_grace_period_seconds(self) -> int:
        """From the deletion of a pod until the kubelet kills it."""
        return self.spec.drain.pre_stop_seconds + self.drain_timeout_seconds + _GRACE_MARGIN_SECONDS

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's names in the OpenAI API; responses carry the first."""
        first = self.spec.model.served_name or self.name
        return tuple(dict.fromkeys((first, *self.spec.model.aliases)))

    @property
    def follows_adapters(self) -> bool:
        """Whether the pods have a sidecar that downloads what `adapters` lists, also while that is empty."""
        return self.spec.engine.max_adapters is not None and not self.spec.engine.adapters_path

    @property
    def service_account_name(self) -> str:
        """The user's ServiceAccount, or the generated one without rights."""
        return self.spec.security.service_account_name or self.name

    @property
    def identity_labels(self) -> dict[str, str]:
        """Labels by which a cloud recognizes pods that use the identity of their ServiceAccount."""
        return names.AKS_IDENTITY if self.spec.security.identity.workload == "AKS" else {}

    @property
    def model_dir(self) -> str:
        """The directory of the model on its volume."""
        claim, cache = self.spec.model.source.pvc, self.spec.cache
        if claim is not None:
            return claim.path
        is_shared = cache is not None and cache.is_shared
        return f"{names.FETCHED_DIR}-{self.content}" if is_shared else names.FETCHED_DIR

    @property
    def content(self) -> str:
        """A hash that identifies the content of a shared claim: of the source, and of the claim's name if the
        user gives it.
        """
        source, cache = self.spec.model.source, self.spec.cache
        parts = (source.uri, source.endpoint, cache.existing_claim if cache is not None else "")
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_HASH_LENGTH]

    @property
    def claim_name(self) -> str:
        """Name of the shared claim: the user's, or the generated one."""
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
    """Read and validate one object; SpecError names the first invalid field and what to do."""
    if body.get("apiVersion") != names.API_VERSION or body.get("kind") != names.KIND:
        raise SpecError("kind", f"expected apiVersion {names.API_VERSION}, kind {names.KIND}")
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping):
        raise SpecError("metadata", "required: give at least a name")
    name = metadata.get("name")
    validation.check_name(name)
    spec = reader.read(Spec, body.get("spec"), "spec")
    validation.check_spec(spec)
    if spec.sharing is not None and spec.rollout.strategy == "Auto":
        # No second pod has an accelerator, and an old one still has it while it ends.
        spec = replace(spec, rollout=replace(spec.rollout, strategy="Recreate"))
    is_of_one_node = spec.cache is not None and spec.cache.is_of_one_node
    if (is_of_one_node or spec.parallelism.nodes > 1) and spec.rollout.strategy == "Auto":
        # A surge pod on another node would wait for the claim for ever; groups are replaced in place only.
        spec = replace(spec, rollout=replace(spec.rollout, strategy="InPlace"))
    if spec.disaggregation is not None:
        spec = _of_decode_pods(spec, spec.disaggregation)
    if spec.autoscaling is not None and spec.autoscaling.min_replicas == 0:
        # Fewest pods while there are requests is one; that there may be none is what `idle` says.
        idle = spec.autoscaling.idle or Idle()
        spec = replace(spec, autoscaling=replace(spec.autoscaling, min_replicas=1, idle=idle))
    model = LLMDeployment(
        name=str(name),
        namespace=str(metadata.get("namespace") or "default"),
        uid=str(metadata.get("uid") or ""),
        generation=int(metadata.get("generation") or 0),
        spec=spec,
    )
    validation.check_adapter_names(spec.adapters, model.served_names)
    return model


def _of_decode_pods(spec: Spec, roles: Disaggregation) -> Spec:
    """The spec with what `disaggregation.decode` says in the place of what it stands for. Prefill pods
    without their own keep what the spec says.
    """
    decode, own, sizes = roles.decode, spec.resources, spec.parallelism
    resources = roles.prefill.resources or RoleResources(cpu=own.cpu, memory=own.memory)
    if resources.accelerator is None:
        resources = replace(resources, gpu=own.gpu, profile_ref=own.profile_ref)
    prefill = replace(
        roles.prefill,
        resources=resources,
        parallelism=roles.prefill.parallelism
        or RoleParallelism(tensor=sizes.tensor, pipeline=sizes.pipeline),
    )
    return replace(
        _of_role(spec, decode),
        replicas=spec.replicas if decode.replicas is None else decode.replicas,
        disaggregation=replace(roles, prefill=prefill, decode=Decode()),
    )


def _of_role(spec: Spec, role: Prefill | Decode) -> Spec:
    """The spec with a role's own CPU, memory and accelerator, and its own ranks, where it has any."""
    if (own := role.resources) is not None:
        resources = replace(spec.resources, cpu=own.cpu, memory=own.memory)
        if own.accelerator is not None:
            resources = replace(resources, gpu=own.gpu, profile_ref=own.profile_ref)
        spec = replace(spec, resources=resources)
    if (sizes := role.parallelism) is not None:
        ranks = replace(spec.parallelism, tensor=sizes.tensor, pipeline=sizes.pipeline)
        spec = replace(spec, parallelism=ranks)
    return spec


def _autoscaling(prefill: Prefill, decode: Autoscaling | None) -> Autoscaling | None:
    """That of the prefill pods, by the prompts that wait for them."""
    own = prefill.autoscaling
    if own is None:
        return None
    given = Autoscaling(
        min_replicas=own.min_replicas,
        max_replicas=own.max_replicas,
        backend="HPA",
        metrics=(Metric(type="QueueDepth"),),
    )
    return given if decode is None else replace(given, behavior=decode.behavior)
