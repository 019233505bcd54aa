"""Manifests of a model hub and of an S3 store, each a pod that serves the model of the claim `smollm2`."""

from __future__ import annotations

from pathlib import Path

from e2e.cluster import pki
from e2e.kubectl import Kubectl, Manifest

HUB = "hub"
TLS = "hub-tls"
CA_BUNDLE = "hub-ca"
STORE = "versitygw"
PORT = 8000
KEY_ID = "AKIAQUIRESTORY"
PYTHON = "/opt/quire/bin/python"

# Files of a claim are not executable, so the program is copied first.
START_STORE = f"""
import os, shutil
shutil.copy("/program/{STORE}", "/tmp/{STORE}")
os.chmod("/tmp/{STORE}", 0o700)
os.makedirs("/tmp/meta", exist_ok=True)
flags = ["--port", ":{PORT}", "--quiet", "posix", "--sidecar", "/tmp/meta", "/buckets"]
os.execv("/tmp/{STORE}", ["{STORE}", *flags])
"""


def service_url(name: str, namespace: str, scheme: str = "http") -> str:
    return f"{scheme}://{name}.{namespace}.svc:{PORT}"


def apply_and_wait(kube: Kubectl, *manifests: Manifest) -> None:
    """Applies them and waits until their pod is ready."""
    kube.apply(*manifests)
    metadata = next(each["metadata"] for each in manifests if each["kind"] == "Pod")
    ready = ("--for=condition=Ready", "--timeout=120s")
    kube.run("wait", "pod", metadata["name"], "-n", metadata["namespace"], *ready)


def hub_manifests(namespace: str, image: str, token: str, directory: Path) -> list[Manifest]:
    """A hub that requires `token`. The authority of its certificate, which is made in `directory`, is in the
    ConfigMap `CA_BUNDLE`.
    """
    authority = pki.Authority(directory)
    authority.issue(pki.Identity(HUB, HUB, serves=(f"{HUB}.{namespace}.svc",)))
    metadata = {"namespace": namespace, "name": HUB}
    code = (Path(__file__).parent / "fake_hub.py").read_text(encoding="utf-8")
    container = {
        "command": [PYTHON, "/code/fake_hub.py", "/models", "/token/token", "/tls/tls.crt", "/tls/tls.key"],
        "volumeMounts": [
            mount("model", "/models"),
            mount("code", "/code"),
            mount("token", "/token"),
            mount("tls", "/tls"),
        ],
    }
    volumes = [
        {"name": "code", "configMap": {"name": HUB}},
        {"name": "token", "secret": {"secretName": HUB}},
        {"name": "tls", "secret": {"secretName": TLS}},
    ]
    pair = {
        "tls.crt": (directory / f"{HUB}.crt").read_text(encoding="utf-8"),
        "tls.key": (directory / f"{HUB}.key").read_text(encoding="utf-8"),
    }
    bundle = {"ca.crt": authority.certificate.read_text(encoding="utf-8")}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"fake_hub.py": code}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"token": token}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {**metadata, "name": TLS}, "stringData": pair},
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {**metadata, "name": CA_BUNDLE},
            "data": bundle,
        },
        *service_and_pod(metadata, image, container, volumes),
    ]


def store_manifests(namespace: str, image: str, secret: str) -> list[Manifest]:
    """An S3 store; its program is a file of the claim `STORE`."""
    metadata = {"namespace": namespace, "name": STORE}
    keys = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": secret}
    of_root = {"ROOT_ACCESS_KEY": "AWS_ACCESS_KEY_ID", "ROOT_SECRET_KEY": "AWS_SECRET_ACCESS_KEY"}
    container = {
        "command": [PYTHON, "-c", START_STORE],
        "env": [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": STORE, "key": key}}}
            for name, key in of_root.items()
        ],
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "buckets", "mountPath": "/buckets"},
            mount("model", "/buckets/models/smollm2"),
            mount("program", "/program"),
        ],
    }
    volumes = [
        {"name": "program", "persistentVolumeClaim": {"claimName": STORE, "readOnly": True}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "buckets", "emptyDir": {}},
    ]
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": keys},
        *service_and_pod(metadata, image, container, volumes),
    ]


def mount(name: str, path: str) -> Manifest:
    return {"name": name, "mountPath": path, "readOnly": True}


def service_and_pod(
    metadata: Manifest, image: str, container: Manifest, volumes: list[Manifest]
) -> list[Manifest]:
    """A Service and its pod."""
    name = metadata["name"]
    model = {"name": "model", "persistentVolumeClaim": {"claimName": "smollm2", "readOnly": True}}
    pod = {
        "containers": [
            {
                "name": name,
                "image": image,
                "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                **container,
            }
        ],
        "volumes": [model, *volumes],
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    service = {"selector": {"app": name}, "ports": [{"port": PORT}]}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "labels": {"app": name}}, "spec": pod},
    ]
