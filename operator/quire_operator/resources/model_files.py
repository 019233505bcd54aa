"""The model in the pod: its volume and, where each pod downloads for itself, the init container that does
so.

Only that container sees the credentials and may write; the server mounts the volume read-only. An interrupted
download resumes, and a completed one only checks the files.
"""

from __future__ import annotations

from typing import Any

from quire_operator import names
from quire_operator.resources import environment
from quire_operator.resources.manifest import RESTRICTED_CONTAINER, Manifest, compact
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment
from quire_operator.spec.schema import ModelCache, Source

CA_FILE = "ca.crt"
# A new volume belongs to root until the kubelet changes its group to this one.
WRITABLE = {"fsGroup": names.USER_ID, "fsGroupChangePolicy": "OnRootMismatch"}
# Entries of the Secret of an S3 source, and whether each may be missing.
AWS_VARIABLES = {"AWS_ACCESS_KEY_ID": False, "AWS_SECRET_ACCESS_KEY": False, "AWS_SESSION_TOKEN": True}


def build(model: LLMDeployment, settings: Settings) -> Manifest:
    """The initContainers, volumes and securityContext that the pod needs for its model."""
    source, cache = model.spec.model.source, model.spec.cache
    if cache is None or cache.is_shared:
        held_by = source.pvc.claim_name if source.pvc is not None else model.claim_name
        claim = {"claimName": held_by, "readOnly": True}
        volume: Manifest = {"name": "model", "persistentVolumeClaim": claim}
        return {"initContainers": [], "volumes": [volume], "securityContext": {}}
    resources = model.spec.resources
    # A pod's request is the maximum of init and main containers, so this adds nothing.
    share = {
        "requests": {"cpu": resources.cpu, "memory": resources.memory},
        "limits": {"memory": resources.memory},
    }
    return {
        "initContainers": [container(model, settings, cache, share)],
        "volumes": [_volume(cache), *secret_volumes(source, cache)],
        "securityContext": WRITABLE if cache.mode == "PerReplica" else {},
    }


def container(model: LLMDeployment, settings: Settings, cache: ModelCache, resources: Manifest) -> Manifest:
    """The download container. It mounts the volumes model, tmp, home and those of `secret_volumes`."""
    source = model.spec.model.source
    target = names.model_path(model.model_dir)
    return {
        "name": names.FETCHER,
        "image": settings.engine_image,
        "imagePullPolicy": settings.engine_image_pull_policy,
        "args": [
            *("fetch", source.uri, "--to", target, "--status-port", str(names.PORT_HEALTH)),
            *(["--anonymous"] if source.is_anonymous else []),
        ],
        **compact({"env": _environment(source, cache, settings)}),
        "resources": resources,
        **RESTRICTED_CONTAINER,
        "volumeMounts": [
            {"name": "model", "mountPath": names.PATH_MODELS},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "home", "mountPath": names.PATH_HOME},
            *_secret_mounts(source, cache),
        ],
    }


def _environment(source: Source, cache: ModelCache, settings: Settings) -> list[Manifest]:
    """Endpoints, references to Secrets, and the user's variables (such as a proxy)."""
    variables = environment.of_download(cache.download.env, settings)
    values = endpoints(source)
    if source.hugging_face is not None and (ref := source.hugging_face.token_secret_ref):
        variables.append(_from_secret("HF_TOKEN", ref.name, ref.key))
    if source.s3 is not None and (reference := source.s3.credentials_secret_ref):
        for name, optional in AWS_VARIABLES.items():
            variables.append(_from_secret(name, reference.name, name, optional=optional))
    if source.gcs is not None and (key := source.gcs.credentials_secret_ref):
        values["GOOGLE_APPLICATION_CREDENTIALS"] = f"{names.PATH_GCS_KEY}/{key.key}"
    if source.oci is not None and source.oci.pull_secret_ref:
        values["DOCKER_CONFIG"] = names.PATH_PULL_SECRET
    if cache.download.ca_bundle_config_map_ref:
        values["SSL_CERT_FILE"] = f"{names.PATH_CA_BUNDLE}/{CA_FILE}"
    given = {item.name for item in cache.download.env}
    own = [{"name": name, "value": value} for name, value in values.items() if value and name not in given]
    return [*variables, *own]


def endpoints(source: Source) -> dict[str, str]:
    """The variables that say where a source is; some may be empty."""
    if source.hugging_face is not None:
        return {"HF_ENDPOINT": source.hugging_face.endpoint}
    if source.s3 is not None:
        return {
            "AWS_ENDPOINT_URL": source.s3.endpoint,
            "AWS_REGION": source.s3.region,
            "AWS_EC2_METADATA_DISABLED": "true",  # the node's identity is out of reach
        }
    return {}


def _from_secret(name: str, secret: str, key: str, *, optional: bool = False) -> Manifest:
    reference: dict[str, Any] = {"name": secret, "key": key, **({"optional": True} if optional else {})}
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def _volume(cache: ModelCache) -> Manifest:
    if cache.mode == "None":
        return {"name": "model", "emptyDir": {"sizeLimit": cache.size}}
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": cache.size}},
        **compact({"storageClassName": cache.storage_class_name}),
    }
    return {"name": "model", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def secret_volumes(source: Source, cache: ModelCache) -> list[Manifest]:
    """The Secrets and ConfigMaps that the download container mounts as files."""
    volumes: list[Manifest] = []
    if source.gcs is not None and (key := source.gcs.credentials_secret_ref):
        items = [{"key": key.key, "path": key.key}]
        volumes.append({"name": "gcs-key", "secret": {"secretName": key.name, "items": items}})
    if source.oci is not None and (pull := source.oci.pull_secret_ref):
        items = [{"key": ".dockerconfigjson", "path": "config.json"}]
        volumes.append({"name": "registry", "secret": {"secretName": pull.name, "items": items}})
    if bundle := cache.download.ca_bundle_config_map_ref:
        volumes.append({"name": "ca-bundle", "configMap": {"name": bundle.name}})
    return volumes


def _secret_mounts(source: Source, cache: ModelCache) -> list[Manifest]:
    paths = {
        "gcs-key": names.PATH_GCS_KEY,
        "registry": names.PATH_PULL_SECRET,
        "ca-bundle": names.PATH_CA_BUNDLE,
    }
    return [
        {"name": volume["name"], "mountPath": paths[volume["name"]], "readOnly": True}
        for volume in secret_volumes(source, cache)
    ]
