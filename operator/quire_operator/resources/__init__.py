"""What an LLMDeployment becomes: its children as plain manifests. Pure; called by reconcile and by `render`.

One kind a file, each a literal dict that reads as the YAML would, and none knows another: what one needs of
the other is handed over here. Nothing knows what the cluster holds.
"""

from __future__ import annotations

from quire_operator.resources import (
    config_map,
    deployment,
    disruption_budget,
    hpa,
    http_route,
    model_files,
    network_policy,
    pod,
    revision,
    scaled_object,
    service,
    service_account,
    shared_model,
)
from quire_operator.resources.kept import KEPT_KINDS, Kept, is_same, kept, stored, with_kept
from quire_operator.resources.manifest import Manifest
from quire_operator.resources.pace import Measured
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment, Profile

__all__ = [
    "KEPT_KINDS",
    "Kept",
    "Manifest",
    "Measured",
    "build",
    "is_same",
    "kept",
    "revision",
    "stored",
    "with_kept",
]

UNMEASURED = Measured()


def build(
    model: LLMDeployment,
    settings: Settings,
    measured: Measured = UNMEASURED,
    profile: Profile | None = None,
) -> tuple[Manifest, ...]:
    """All children, in the order to apply them: what the pods need comes before the pods, and the autoscaler
    before the Deployment is left to it; last what leads to the pods from outside, and may be refused.
    `measured`: of the pods that run, which sets the autoscaler's pace; `profile`: the one that
    spec.resources.profileRef names, if there is one of that name.

    Raises SpecError where the administrator's settings forbid what the user asks for.
    """
    own_account = not model.spec.security.service_account_name
    restricted = model.spec.networking.network_policy.mode == "Restricted"
    environment = config_map.build(model)
    template = pod.build(
        model,
        settings,
        config_map=environment["metadata"]["name"],
        model_parts=model_files.build(model, settings),
        profile=profile,
    )
    return (
        *([service_account.build(model)] if own_account else []),
        environment,
        *([network_policy.build(model, settings)] if restricted else []),
        *_shared_model(model, settings, template),
        service.build(model),
        disruption_budget.build(model),
        *_autoscaler(model, settings, measured),
        deployment.build(model, template),
        *http_route.build(model),
    )


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


def _autoscaler(model: LLMDeployment, settings: Settings, measured: Measured) -> list[Manifest]:
    scaling = model.spec.autoscaling
    if scaling is not None and model.autoscaler == "HPA":
        return [hpa.build(model, scaling, measured)]
    if scaling is not None and model.autoscaler == "KEDA":
        return [scaled_object.build(model, scaling, measured, settings.load_url)]
    return []
