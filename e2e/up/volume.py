"""Puts the model where pods find it: behind the claim `smollm2` of a namespace.

On the node of `e2e/cluster` that is a directory of this machine. Another cluster gets a claim of its default
storage class, filled through a pod. Called by `flow`.
"""

import shutil
import subprocess
from pathlib import Path

from e2e.kubectl import Kubectl, Manifest
from e2e.up.errors import UpError

CLAIM = "smollm2"
_SIZE = {"storage": "1Gi"}
_LOADER = "quire-model-loader"
_DONE = "/models/.complete"


def on_node(model: Path, directory: Path) -> None:
    """Copies the model to the directory that the node's volume shows (a copy: nothing may harm the cache)."""
    if (directory / ".complete").exists():
        return
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(model, directory)
    directory.chmod(0o755)
    for path in directory.iterdir():
        path.chmod(0o644)  # pods run as a user of their own
    (directory / ".complete").touch()


def claim(kubectl: Kubectl, namespace: str, directory: Path) -> None:
    """Makes the claim over the directory; returns when it is bound."""
    kubectl.apply(*manifests(namespace, directory))
    bound = "--for=jsonpath={.status.phase}=Bound"
    kubectl.run("wait", bound, f"persistentvolumeclaim/{CLAIM}", "-n", namespace, "--timeout=60s")


def manifests(namespace: str, directory: Path) -> tuple[Manifest, Manifest]:
    """A PersistentVolume over a directory of the node and the claim that it is reserved for."""
    name = f"{namespace}-{CLAIM}"
    volume: Manifest = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": _SIZE,
            "accessModes": ["ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "hostPath": {"path": str(directory), "type": "Directory"},
            "claimRef": {"namespace": namespace, "name": CLAIM},
        },
    }
    return volume, {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM, "namespace": namespace},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",
            "volumeName": name,
            "resources": {"requests": _SIZE},
        },
    }


def through_pod(kubectl: Kubectl, model: Path, namespace: str, image: str) -> None:
    """Makes a claim of the cluster's default storage class and copies the model in, once."""
    if kubectl.get("persistentvolumeclaim", CLAIM, namespace) is None:
        kubectl.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": CLAIM, "namespace": namespace},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": _SIZE}},
            }
        )
    kubectl.run("delete", "pod", _LOADER, "-n", namespace, "--ignore-not-found", "--wait")
    kubectl.apply(_loader_pod(namespace, image))
    try:
        kubectl.run("wait", "--for=condition=Ready", f"pod/{_LOADER}", "-n", namespace, "--timeout=600s")
        inside = kubectl.argv("exec", "-i", "-n", namespace, _LOADER, "--")
        if subprocess.run([*inside, "test", "-e", _DONE], capture_output=True).returncode != 0:
            _copy(model, [*inside, "sh", "-c", f"tar -x -C /models && touch {_DONE}"])
    finally:
        kubectl.run("delete", "pod", _LOADER, "-n", namespace, "--ignore-not-found", "--wait")


def _copy(model: Path, unpack: list[str]) -> None:
    # The files by name and not ".": the volume's own directory may belong to somebody else.
    names = sorted(path.name for path in model.iterdir())
    with subprocess.Popen(["tar", "-c", "-C", str(model), *names], stdout=subprocess.PIPE) as pack:
        done = subprocess.run(unpack, stdin=pack.stdout, capture_output=True, text=True)
    if done.returncode != 0 or pack.returncode != 0:
        raise UpError(f"the model could not be copied into the claim {CLAIM}: {done.stderr.strip()}")


def _loader_pod(namespace: str, image: str) -> Manifest:
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    user = {"runAsNonRoot": True, "runAsUser": 65532, "fsGroup": 65532}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": _LOADER, "namespace": namespace},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "loader",
                    "image": image,
                    "command": ["sleep", "3600"],
                    "securityContext": restricted,
                    "volumeMounts": [{"name": "model", "mountPath": "/models"}],
                }
            ],
            "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": CLAIM}}],
        },
    }
