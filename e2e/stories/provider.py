"""Manifests of a provider of completions and of a classifier of prompts, which are one pod."""

from __future__ import annotations

from pathlib import Path

from e2e.cluster import pki
from e2e.kubectl import Manifest
from e2e.stories.model_sources import PYTHON, mount, service_and_pod

NAME = "provider"
CLASSIFIER = "classes"
CLASSIFIER_PORT = 8001


def host(namespace: str) -> str:
    """Its name in certificates, and in the chart's list of hosts that get the key."""
    return f"{NAME}.{namespace}.svc"


def manifests(namespace: str, image: str, key: str, authority: pki.Authority) -> list[Manifest]:
    """One that requires the key, and has a certificate of the authority."""
    authority.issue(pki.Identity(NAME, NAME, serves=(host(namespace),)))
    metadata: Manifest = {"namespace": namespace, "name": NAME}
    files = {
        "key": key,
        **{
            f"tls.{end}": (authority.directory / f"{NAME}.{end}").read_text(encoding="utf-8")
            for end in ("crt", "key")
        },
    }
    code = (Path(__file__).parent / "fake_provider.py").read_text(encoding="utf-8")
    container: Manifest = {
        "command": [PYTHON, "/code/fake_provider.py", "/files/key", "/files/tls.crt", "/files/tls.key"],
        "volumeMounts": [mount("code", "/code"), mount("files", "/files")],
    }
    volumes: list[Manifest] = [
        {"name": "code", "configMap": {"name": NAME}},
        {"name": "files", "secret": {"secretName": NAME}},
    ]
    service, pod = service_and_pod(metadata, image, container, volumes)
    # The gateway's NetworkPolicy lets it connect to classifiers by this label.
    pod["metadata"]["labels"]["serving.quire.dev/role"] = "classifier"
    classifier = {"selector": {"app": NAME}, "ports": [{"port": CLASSIFIER_PORT}]}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"fake_provider.py": code}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": files},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {**metadata, "name": CLASSIFIER},
            "spec": classifier,
        },
        service,
        pod,
    ]
