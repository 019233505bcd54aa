"""A model that is downloaded once for all pods: the claim that holds it, and the Job that fills it.

Both have a hash of the content in their names, so another model gets another claim and the running pods keep
theirs. Only the Job sees the credentials and may write; serving pods mount the claim read-only
(`model_files`). When a Job is replaced is decided in `plan.model_cache`.
"""

from __future__ import annotations

from typing import Any

from quire_operator import names
from quire_operator.resources import model_files
from quire_operator.resources.manifest import Manifest, compact, metadata
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment
from quire_operator.spec.schema import ModelCache

# Exit codes that a retry cannot change: configuration, checksum mismatch, not found, disk, access.
FINAL_EXIT_CODES = (2, 65, 66, 73, 77)
# With Kubernetes' back-off, 10 s doubled up to 6 min, this outlasts an hour without network.
_RETRIES = 12
# For sha256 over four connections, without buffering.
_RESOURCES: Manifest = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
_SCRATCH_SIZE = "1Gi"
# Where a volume can be mounted depends on where its first pod ran, so the Job is placed like the serving
# pods.
_PLACEMENT = ("nodeSelector", "tolerations", "affinity", "schedulerName", "imagePullSecrets")


def claim(model: LLMDeployment, cache: ModelCache) -> Manifest:
    """The generated claim. It has no owner reference where it is to be retained."""
    about = metadata(model, model.claim_name)
    if cache.retain_policy == "Retain":
        about.pop("ownerReferences", None)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": about,
        "spec": {
            "accessModes": [cache.access_mode or "ReadWriteMany"],
            "resources": {"requests": {"storage": cache.size}},
            **compact({"storageClassName": cache.storage_class_name}),
        },
    }


def job(model: LLMDeployment, settings: Settings, cache: ModelCache, serving: Manifest) -> Manifest:
    """The download Job. `serving`: the template of the serving pods, whose placement it shares."""
    placement = {key: serving["spec"][key] for key in _PLACEMENT if key in serving["spec"]}
    volume = {"name": "model", "persistentVolumeClaim": {"claimName": model.claim_name}}
    scratch = [{"name": name, "emptyDir": {"sizeLimit": _SCRATCH_SIZE}} for name in ("tmp", "home")]
    secrets = model_files.secret_volumes(model.spec.model.source, cache)
    security = {**serving["spec"]["securityContext"], **model_files.WRITABLE}
    restart = compact({"annotations": compact({names.ANNOTATION_RESTART_ID: model.spec.rollout.restart_id})})
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(model, model.download_name),
        "spec": {
            "backoffLimit": _RETRIES,
            "activeDeadlineSeconds": cache.download.timeout_seconds,
            "podFailurePolicy": {"rules": _failure_rules()},
            "template": {
                "metadata": {
                    "labels": (
                        names.child_labels(model.name)
                        | names.fetcher_labels(model.name)
                        | model.identity_labels
                    ),
                    **restart,
                },
                "spec": {
                    "restartPolicy": "Never",
                    "serviceAccountName": model.service_account_name,
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 5,
                    "securityContext": security,
                    **placement,
                    **_near_serving_pods(model, cache, placement),
                    "containers": [model_files.container(model, settings, cache, _RESOURCES)],
                    "volumes": [volume, *scratch, *secrets],
                },
            },
        },
    }


def _failure_rules() -> list[Manifest]:
    """A disrupted pod is no failure; some exit codes fail the Job at once."""
    codes = {"containerName": names.FETCHER, "operator": "In", "values": list(FINAL_EXIT_CODES)}
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": codes},
    ]


def _near_serving_pods(model: LLMDeployment, cache: ModelCache, placement: Manifest) -> dict[str, Any]:
    """Prefers the node of a serving pod where only one node can mount the claim."""
    affinity = placement.get("affinity", {})
    if not cache.is_of_one_node or "podAffinity" in affinity:
        return {}
    near = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": names.selector_labels(model.name)},
    }
    preferred = [{"weight": 100, "podAffinityTerm": near}]
    beside = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    return {"affinity": {**affinity, **beside}}
