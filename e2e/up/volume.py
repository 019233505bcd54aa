"""Puts a model where pods find it: behind a claim of a namespace.

On the node of `e2e/cluster` a claim shows a directory of this machine. Another cluster gets a claim of its
default storage class, filled through a pod.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from e2e.kubectl import Kubectl, Manifest
from e2e.up.errors import UpError

CLAIM = "smollm2"
SPARE = "spare"
_SIZE = {"storage": "1Gi"}
_LOADER = "quire-model-loader"
_DONE = "/models/.complete"


class Volumes(Protocol):
    """How models get behind claims in one cluster."""

    def provide(self, model: Path, namespace: str, claim: str = CLAIM) -> None:
        """Makes the claim and what is behind it; returns when a pod may mount the model."""

    def spare(self, namespace: str, access: str = "ReadWriteMany") -> Manifest:
        """Makes an empty volume for one claim; returns its class and access as spec.cache has them."""

    def remove(self, namespace: str, claim: str = CLAIM) -> None:
        """Lets claim and volume go, at once or as soon as no pod mounts them; does not wait."""


@dataclass(frozen=True)
class OnNode:
    """Volumes over directories of this machine, whose disk the node of `e2e/cluster` shares.

    Stories side by side share the copy of SmolLM2, which stays because the volume of `make up` shows it.
    """

    kubectl: Kubectl
    directory: Path

    def provide(self, model: Path, namespace: str, claim: str = CLAIM) -> None:
        """A PersistentVolume over a copy of the model, and the claim that it is reserved for."""
        shown = self.directory / model.name
        _copy_on_node(model, shown)
        self._delete_unbound(_volume_name(namespace, claim))
        self.kubectl.apply(*_manifests(namespace, claim, shown))
        bound = "--for=jsonpath={.status.phase}=Bound"
        self.kubectl.run("wait", bound, f"persistentvolumeclaim/{claim}", "-n", namespace, "--timeout=60s")

    def spare(self, namespace: str, access: str = "ReadWriteMany") -> Manifest:
        """An empty directory, for a claim whose class has the volume's own name."""
        name = _volume_name(namespace, SPARE)
        shown = self.directory / name
        shutil.rmtree(shown, ignore_errors=True)
        shown.mkdir(parents=True)
        shown.chmod(0o777)  # the kubelet gives no such volume to the pod's group
        self._delete_unbound(name)
        self.kubectl.apply(_volume(name, shown, access=access, storageClassName=name))
        return {"storageClassName": name, "accessMode": access}

    def remove(self, namespace: str, claim: str = CLAIM) -> None:
        """Deletes both, and the copy when no other volume shows it."""
        self.kubectl.delete("persistentvolumeclaim", claim, namespace, "--wait=false")
        name = _volume_name(namespace, claim)
        shown = {
            volume["metadata"]["name"]: Path(volume["spec"].get("hostPath", {}).get("path", "/"))
            for volume in self.kubectl.list("persistentvolumes", "")
        }
        self.kubectl.run("delete", "persistentvolume", name, "--ignore-not-found", "--wait=false")
        copy = shown.pop(name, None)
        if copy and copy.parent == self.directory and copy not in shown.values():
            shutil.rmtree(copy)

    def _delete_unbound(self, name: str) -> None:
        """A volume remembers the claim that it had, and is bound to no other of the same name."""
        volume = self.kubectl.get("persistentvolumes", name, "") or {
            "metadata": {},
            "status": {"phase": "Bound"},
        }
        if volume["status"].get("phase") != "Bound" or "deletionTimestamp" in volume["metadata"]:
            self.kubectl.run("delete", "persistentvolume", name, "--ignore-not-found", "--timeout=60s")


@dataclass(frozen=True)
class ThroughPod:
    """Claims of the cluster's default storage class; `image` is one with sh and tar that it can pull."""

    kubectl: Kubectl
    image: str

    def provide(self, model: Path, namespace: str, claim: str = CLAIM) -> None:
        """Makes the claim if it is not there and copies the model in, once."""
        if self.kubectl.get("persistentvolumeclaims", claim, namespace) is None:
            spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": _SIZE}}
            metadata = {"name": claim, "namespace": namespace}
            self.kubectl.apply(
                {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
            )
        self._delete_loader(namespace)
        self.kubectl.apply(_loader_pod(namespace, claim, self.image))
        try:
            ready = ("--for=condition=Ready", f"pod/{_LOADER}", "-n", namespace, "--timeout=600s")
            self.kubectl.run("wait", *ready)
            inside = self.kubectl.argv("exec", "-i", "-n", namespace, _LOADER, "--")
            if subprocess.run([*inside, "test", "-e", _DONE], capture_output=True).returncode != 0:
                _copy_through(model, claim, [*inside, "sh", "-c", f"tar -x -C /models && touch {_DONE}"])
        finally:
            self._delete_loader(namespace)

    def spare(self, namespace: str, access: str = "ReadWriteMany") -> Manifest:
        """Few default classes offer more than one node."""
        del namespace, access
        return {"accessMode": "ReadWriteOnce"}

    def remove(self, namespace: str, claim: str = CLAIM) -> None:
        """Deletes the claim; its storage class decides about the volume."""
        self.kubectl.delete("persistentvolumeclaim", claim, namespace, "--wait=false")

    def _delete_loader(self, namespace: str) -> None:
        self.kubectl.delete("pod", _LOADER, namespace)


def _copy_on_node(model: Path, directory: Path) -> None:
    """A copy, so that nothing may harm the cache, which pods with a user of their own can read."""
    if (directory / ".complete").exists():
        return
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(model, directory)
    directory.chmod(0o755)
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (directory / ".complete").touch()


def _volume_name(namespace: str, claim: str) -> str:
    return f"{namespace}-{claim}"


def _manifests(namespace: str, claim: str, directory: Path) -> tuple[Manifest, Manifest]:
    name = _volume_name(namespace, claim)
    claim_ref = {"namespace": namespace, "name": claim}
    return _volume(name, directory, access="ReadOnlyMany", storageClassName="", claimRef=claim_ref), {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim, "namespace": namespace},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",
            "volumeName": name,
            "resources": {"requests": _SIZE},
        },
    }


def _volume(name: str, directory: Path, *, access: str, **fields: Any) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": _SIZE,
            "accessModes": [access],
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(directory), "type": "Directory"},
            **fields,
        },
    }


def _copy_through(model: Path, claim: str, unpack: list[str]) -> None:
    # The files by name and not ".": the volume's own directory may belong to another user.
    names = sorted(path.name for path in model.iterdir())
    with subprocess.Popen(["tar", "-c", "-C", str(model), *names], stdout=subprocess.PIPE) as pack:
        done = subprocess.run(unpack, stdin=pack.stdout, capture_output=True, text=True)
    if done.returncode != 0 or pack.returncode != 0:
        raise UpError(f"the model could not be copied into the claim {claim}: {done.stderr.strip()}")


def _loader_pod(namespace: str, claim: str, image: str) -> Manifest:
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
            "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }
