"""Where the stories' models come from: a hub and an S3 store, each a pod that shows the model of the story's
claim `smollm2`. Used by story 13.
"""

from __future__ import annotations

from pathlib import Path

from e2e.kubectl import Kubectl, Manifest

HUB = "hub"
STORE = "versitygw"
PORT = 8000
KEY_ID = "AKIAQUIRESTORY"
PYTHON = "/opt/quire/bin/python"

# A claim's files are nobody's to execute.
START_STORE = f"""
import os, shutil
shutil.copy("/program/{STORE}", "/tmp/{STORE}")
os.chmod("/tmp/{STORE}", 0o700)
os.makedirs("/tmp/meta", exist_ok=True)
flags = ["--port", ":{PORT}", "--quiet", "posix", "--sidecar", "/tmp/meta", "/buckets"]
os.execv("/tmp/{STORE}", ["{STORE}", *flags])
"""


def address(name: str, namespace: str) -> str:
    return f"http://{name}.{namespace}.svc:{PORT}"


def run(kube: Kubectl, *manifests: Manifest) -> None:
    """Applies them and waits until their pod is ready."""
    kube.apply(*manifests)
    about = next(each["metadata"] for each in manifests if each["kind"] == "Pod")
    ready = ("--for=condition=Ready", "--timeout=120s")
    kube.run("wait", "pod", about["name"], "-n", about["namespace"], *ready)


def hub(namespace: str, image: str, token: str) -> list[Manifest]:
    """A hub that wants `token`."""
    about = {"namespace": namespace, "name": HUB}
    code = (Path(__file__).parent / "hub.py").read_text(encoding="utf-8")
    container = {
        "command": [PYTHON, "/code/hub.py", "/models", "/token/token"],
        "volumeMounts": [_mount("model", "/models"), _mount("code", "/code"), _mount("token", "/token")],
    }
    volumes = [
        {"name": "code", "configMap": {"name": HUB}},
        {"name": "token", "secret": {"secretName": HUB}},
    ]
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"hub.py": code}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": about, "stringData": {"token": token}},
        *_served(about, image, container, volumes),
    ]


def store(namespace: str, image: str, secret: str) -> list[Manifest]:
    """An S3 store whose program lies behind the claim of its name."""
    about = {"namespace": namespace, "name": STORE}
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
            _mount("model", "/buckets/models/smollm2"),
            _mount("program", "/program"),
        ],
    }
    volumes = [
        {"name": "program", "persistentVolumeClaim": {"claimName": STORE, "readOnly": True}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "buckets", "emptyDir": {}},
    ]
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": about, "stringData": keys},
        *_served(about, image, container, volumes),
    ]


def _mount(name: str, path: str) -> Manifest:
    return {"name": name, "mountPath": path, "readOnly": True}


def _served(about: Manifest, image: str, container: Manifest, volumes: list[Manifest]) -> list[Manifest]:
    """A Service, and the pod behind it."""
    name = about["name"]
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
        {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": service},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {**about, "labels": {"app": name}}, "spec": pod},
    ]
