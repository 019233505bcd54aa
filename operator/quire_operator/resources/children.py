"""Renders all children of an LLMDeployment as plain manifests, in the order in which they are applied.

One module per kind, each a literal dict that reads as the YAML would. No builder imports another: what one
needs of another is passed in here. Pure; knows nothing of the live cluster.
"""

from __future__ import annotations

from quire_operator import names
from quire_operator.resources import (
    adapters,
    config_map,
    credentials,
    deployment,
    disruption_budget,
    hpa,
    http_route,
    leader_worker_set,
    model_files,
    network_policy,
    pod,
    scaled_object,
    service,
    service_account,
    shared_model,
)
from quire_operator.resources.manifest import Manifest
from quire_operator.resources.scaling_behavior import PodMeasurements
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment, Profile

UNMEASURED = PodMeasurements()


def build(
    model: LLMDeployment,
    settings: Settings,
    measured: PodMeasurements = UNMEASURED,
    profile: Profile | None = None,
    prefill_profile: Profile | None = None,
) -> tuple[Manifest, ...]:
    """All children in the order of apply: what the pods need comes before the Deployment, and so does the
    autoscaler that takes over its replicas; routes from outside the cluster come last, because they may be
    refused. `measured`: measurements of the running pods, which set the autoscaler's behavior; `profile`: the
    AcceleratorProfile that the resources of the pods name, None where there is none; `prefill_profile`: that
    of prefill pods.

    Raises SpecError where the administrator's settings forbid what the user asks for.
    """
    credentials.check(model, settings)
    own_account = not model.spec.security.service_account_name
    environment = config_map.build(model, settings)
    parts = _parts(model, settings, environment, profile)
    template = pod.build(model, settings, parts, role=model.role)
    return (
        *([service_account.build(model)] if own_account else []),
        environment,
        *adapters.build(model),
        *_network_policy(model, settings),
        *_shared_model(model, settings, template),
        *([] if model.prefill is None else _prefill(model.prefill, settings, measured, prefill_profile)),
        service.build(model),
        disruption_budget.build(model),
        *_autoscaler(model, settings, measured),
        _workload(model, settings, template, parts),
        *http_route.build(model),
    )


def _prefill(
    model: LLMDeployment, settings: Settings, measured: PodMeasurements, profile: Profile | None
) -> list[Manifest]:
    """What the prefill pods have of their own."""
    environment = config_map.build(model, settings)
    parts = _parts(model, settings, environment, profile)
    return [
        environment,
        *_network_policy(model, settings),
        service.build_of_prefill(model),
        disruption_budget.build(model),
        *_autoscaler(model, settings, measured),
        deployment.build(model, pod.build(model, settings, parts, role=model.role)),
    ]


def _parts(
    model: LLMDeployment, settings: Settings, environment: Manifest, profile: Profile | None
) -> pod.Parts:
    return pod.Parts(
        config_map=environment["metadata"]["name"],
        model_files=model_files.build(model, settings),
        adapters=adapters.of_pod(model, settings),
        profile=profile,
    )


def _network_policy(model: LLMDeployment, settings: Settings) -> list[Manifest]:
    is_restricted = model.spec.networking.network_policy.mode == "Restricted"
    return [network_policy.build(model, settings)] if is_restricted else []


def _shared_model(model: LLMDeployment, settings: Settings, template: Manifest) -> list[Manifest]:
    cache = model.spec.cache
    if cache is None or not cache.is_shared:
        return []
    restricted = model.spec.networking.network_policy.mode == "Restricted"
    return [
        *([] if cache.existing_claim else [shared_model.claim(model, cache)]),
        *([network_policy.build_of_download(model, settings)] if restricted else []),
        shared_model.job(model, settings, cache, template),
    ]


def _workload(model: LLMDeployment, settings: Settings, template: Manifest, parts: pod.Parts) -> Manifest:
    if not model.is_grouped:
        return deployment.build(model, template)
    worker = pod.build(model, settings, parts, role=names.ROLE_WORKER)
    return leader_worker_set.build(model, template, worker)


def _autoscaler(model: LLMDeployment, settings: Settings, measured: PodMeasurements) -> list[Manifest]:
    scaling = model.spec.autoscaling
    if scaling is not None and model.autoscaler == "HPA":
        return [hpa.build(model, scaling, measured)]
    if scaling is not None and model.autoscaler == "KEDA":
        return [scaled_object.build(model, scaling, measured, settings.load_url)]
    return []
