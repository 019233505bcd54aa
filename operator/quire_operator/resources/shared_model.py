"""A model that is downloaded once for all pods: the claim that holds it, and the Job that fills it.

Both carry the content in their names, so another model gets another claim, and what serves keeps its own. The
Job alone sees the credentials and may write; serving pods mount the claim read-only (`model_files`). What is
done about a Job that has ended is decided elsewhere (`plan.model_cache`).
"""

from __future__ import annotations

from typing import Any

from quire_operator import names
from quire_operator.resources import model_files
from quire_operator.resources.manifest import Manifest, compact, metadata
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment
from quire_operator.spec.sources import ModelCache

# Ends that another try cannot change: configuration, other bytes than promised, not found, disk, access.
FINAL_EXIT_CODES = (2, 65, 66, 73, 77)
# With Kubernetes' own pauses, 10 s doubled up to 6 min, an hour of a network that is away.
_RETRIES = 12
# sha256 over what arrives on four connections, and nothing kept of it.
_RESOURCES: Manifest = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
_SCRATCH_SIZE = "1Gi"
# Where a volume may be mounted depends on where its first pod ran, so the Job goes where pods may go.
_PLACEMENT = ("nodeSelector", "tolerations", "affinity", "schedulerName", "imagePullSecrets")


def claim(model: LLMDeployment, cache: ModelCache) -> Manifest:
    """The claim, unless the user has one. It belongs to nobody where it is to be retained."""
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
    """The download. `serving`: template of the serving pods, whose place it shares."""
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
                    "labels": names.child_labels(model.name) | names.fetcher_labels(model.name),
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
                    **_beside_its_pods(model, cache, placement),
                    "containers": [model_files.container(model, settings, cache, _RESOURCES)],
                    "volumes": [volume, *scratch, *secrets],
                },
            },
        },
    }


def _failure_rules() -> list[Manifest]:
    """A pod that had to go is no failure; of the others, some are the last."""
    codes = {"containerName": names.FETCHER, "operator": "In", "values": list(FINAL_EXIT_CODES)}
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": codes},
    ]


def _beside_its_pods(model: LLMDeployment, cache: ModelCache, placement: Manifest) -> dict[str, Any]:
    """Where one node mounts the claim and a pod uses it already, that node is the one."""
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
