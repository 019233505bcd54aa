"""The LoRA adapters of `spec.adapters` in the pods: their list in a ConfigMap, and a sidecar that follows it.

The list is mutable and no part of the pod template or of a rendered revision: the kubelet writes a change to
the mounted file, and the sidecar downloads what was added and deletes what was dropped while the server goes
on. Only the sidecar sees the credentials and may write; each Secret is one volume with the entries that are
named, so that a new adapter restarts pods only where it names a Secret or a claim that they do not mount yet.
Pods without places for adapters, or with a directory of the user's, have none of this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from quire_operator import names
from quire_operator.resources import environment, model_files
from quire_operator.resources.manifest import RESTRICTED_CONTAINER, Manifest, metadata
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment
from quire_operator.spec.schema import Adapter, ObjectRef, Source

# For one process of the server's program, and two downloads beside it.
_RESOURCES: Manifest = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}}
# Room for as many adapters as a spec names, of a gibibyte each. A pod that exceeds it is evicted.
_SIZE, _SCRATCH_SIZE = "64Gi", "1Gi"
_HASH_LENGTH = 10
_DOCKER_CONFIG = "docker/config.json"  # registry clients expect this name
_LIST, _FILES, _SCRATCH, _CA_BUNDLE = "adapter-list", "adapters", "adapters-tmp", "adapters-ca-bundle"


def build(model: LLMDeployment) -> list[Manifest]:
    """The ConfigMap of the list; none where the pods have no sidecar that reads it."""
    if not model.follows_adapters:
        return []
    listed = {"adapters": [_entry(adapter, model) for adapter in model.spec.adapters]}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(model, names.adapters(model.name)),
            "data": {names.ADAPTER_LIST_FILE: json.dumps(listed, separators=(",", ":"))},
        }
    ]


def of_pod(model: LLMDeployment, settings: Settings) -> Manifest:
    """The sidecar, the volumes, and the server's volumeMounts; all empty where there is no sidecar."""
    if not model.follows_adapters:
        return {"initContainers": [], "volumes": [], "volumeMounts": []}
    read_only = [*_credentials(model), *_claims(model), *_ca_bundle(model)]
    return {
        "initContainers": [_sidecar(model, settings, [mount for _, mount in read_only])],
        "volumes": [
            {"name": _LIST, "configMap": {"name": names.adapters(model.name)}},
            {"name": _FILES, "emptyDir": {"sizeLimit": _SIZE}},
            {"name": _SCRATCH, "emptyDir": {"sizeLimit": _SCRATCH_SIZE}},
            *(volume for volume, _ in read_only),
        ],
        "volumeMounts": [{"name": _FILES, "mountPath": names.PATH_ADAPTERS, "readOnly": True}],
    }


def mounted(model: LLMDeployment) -> tuple[Manifest, ...]:
    """What of the pod template follows from the adapters: other adapters with the same need no other pods."""
    return tuple(volume for volume, _ in (*_credentials(model), *_claims(model)))


def _sidecar(model: LLMDeployment, settings: Settings, mounts: list[Manifest]) -> Manifest:
    """An init container that is restarted runs beside the server, and ends after it. It takes the variables
    that it knows, and those that the administrator allows.
    """
    cache = model.spec.cache
    given = () if cache is None else (item.name for item in cache.download.env)
    return {
        "name": names.ADAPTERS,
        "image": settings.engine_image,
        "imagePullPolicy": settings.engine_image_pull_policy,
        "restartPolicy": "Always",
        "args": [
            "fetch-adapters",
            *("--list", f"{names.PATH_ADAPTER_LIST}/{names.ADAPTER_LIST_FILE}"),
            *("--to", names.PATH_ADAPTERS),
            *(f"--allow-env={name}" for name in given if name not in environment.DOWNLOAD),
        ],
        "resources": _RESOURCES,
        **RESTRICTED_CONTAINER,
        "volumeMounts": [
            # As a directory: the kubelet does not change a file that is mounted by itself.
            {"name": _LIST, "mountPath": names.PATH_ADAPTER_LIST, "readOnly": True},
            {"name": _FILES, "mountPath": names.PATH_ADAPTERS},
            {"name": _SCRATCH, "mountPath": "/tmp"},
            {"name": _SCRATCH, "mountPath": names.PATH_HOME},
            *mounts,
        ],
    }


def _entry(adapter: Adapter, model: LLMDeployment) -> dict[str, Any]:
    """One adapter of the list. It names the files of credentials and never holds one."""
    source, cache = adapter.source, model.spec.cache
    if source.pvc is not None:
        place = f"{names.PATH_ADAPTER_CLAIMS}/{source.pvc.claim_name}"
        return {"name": adapter.name, "path": f"{place}/{source.pvc.path}" if source.pvc.path else place}
    variables = {**model_files.endpoints(source), **_paths(source)}
    if cache is not None:
        variables |= {item.name: item.value for item in cache.download.env}
        if cache.download.ca_bundle_config_map_ref is not None:
            variables.setdefault("SSL_CERT_FILE", f"{names.PATH_CA_BUNDLE}/{model_files.CA_FILE}")
    return {
        "name": adapter.name,
        "source": source.uri,
        "anonymous": source.is_anonymous,
        "environment": {name: value for name, value in variables.items() if value},
        "files": _variables(source),
    }


def _variables(source: Source) -> dict[str, str]:
    """Variables of the download, and the file that holds the value of each."""
    if source.hugging_face is not None and (token := source.hugging_face.token_secret_ref):
        return {"HF_TOKEN": _secret_file(token.name, token.key)}
    if source.s3 is not None and (keys := source.s3.credentials_secret_ref):
        return {name: _secret_file(keys.name, name) for name in model_files.AWS_VARIABLES}
    return {}


def _paths(source: Source) -> dict[str, str]:
    """Variables of the download that say where a file is."""
    if source.gcs is not None and (key := source.gcs.credentials_secret_ref):
        return {"GOOGLE_APPLICATION_CREDENTIALS": _secret_file(key.name, key.key)}
    if source.oci is not None and (pull := source.oci.pull_secret_ref):
        return {"DOCKER_CONFIG": _secret_file(pull.name, _DOCKER_CONFIG).rpartition("/")[0]}
    return {}


def _secret_file(secret: str, path: str) -> str:
    return f"{names.PATH_ADAPTER_SECRETS}/{secret}/{path}"


def _credentials(model: LLMDeployment) -> Iterator[tuple[Manifest, Manifest]]:
    """The Secrets, each with its mount. They are optional, so that a Secret that is missing costs its
    adapters and no pod; the kubelet adds one that comes later.
    """
    files: dict[str, set[tuple[str, str]]] = {}
    for adapter in model.spec.adapters:
        secret, entries = _entries(adapter.source)
        if secret:
            files.setdefault(secret, set()).update(entries)
    for secret, entries in sorted(files.items()):
        name = _volume_name("adapter-secret", secret)
        items = [{"key": key, "path": path} for key, path in sorted(entries)]
        yield (
            {"name": name, "secret": {"secretName": secret, "items": items, "optional": True}},
            {"name": name, "mountPath": f"{names.PATH_ADAPTER_SECRETS}/{secret}", "readOnly": True},
        )


def _entries(source: Source) -> tuple[str, set[tuple[str, str]]]:
    """The Secret of a source, empty where it has none, and its entries with the path of each."""
    hub, s3, gcs, oci = source.hugging_face, source.s3, source.gcs, source.oci
    if oci is not None and oci.pull_secret_ref is not None:
        return oci.pull_secret_ref.name, {(".dockerconfigjson", _DOCKER_CONFIG)}
    if s3 is not None and s3.credentials_secret_ref is not None:
        return s3.credentials_secret_ref.name, {(name, name) for name in model_files.AWS_VARIABLES}
    found = None
    if hub is not None:
        found = hub.token_secret_ref
    elif gcs is not None:
        found = gcs.credentials_secret_ref
    return ("", set()) if found is None else (found.name, {(found.key, found.key)})


def _claims(model: LLMDeployment) -> Iterator[tuple[Manifest, Manifest]]:
    sources = (adapter.source.pvc for adapter in model.spec.adapters)
    for claim in sorted({pvc.claim_name for pvc in sources if pvc is not None}):
        name = _volume_name("adapter-claim", claim)
        yield (
            {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
            {"name": name, "mountPath": f"{names.PATH_ADAPTER_CLAIMS}/{claim}", "readOnly": True},
        )


def _ca_bundle(model: LLMDeployment) -> Iterator[tuple[Manifest, Manifest]]:
    """The authorities that the model's download trusts, with or without adapters that are downloaded."""
    cache = model.spec.cache
    bundle: ObjectRef | None = None if cache is None else cache.download.ca_bundle_config_map_ref
    if bundle is not None:
        yield (
            {"name": _CA_BUNDLE, "configMap": {"name": bundle.name}},
            {"name": _CA_BUNDLE, "mountPath": names.PATH_CA_BUNDLE, "readOnly": True},
        )


def _volume_name(kind: str, name: str) -> str:
    """Names of volumes are shorter than those of Secrets and claims, and have no dots."""
    return f"{kind}-{hashlib.sha256(name.encode()).hexdigest()[:_HASH_LENGTH]}"
