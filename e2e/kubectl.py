"""kubectl and helm with one kubeconfig: how `make up` and the stories reach a cluster, as a user would.

`get` and `list` go through one `kubectl proxy`, because tests repeat them until a condition holds and each
process of kubectl takes 0.15 s of a CPU. Knows nothing of Quire but the path of its resource.
"""

import atexit
import http.client
import json
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

Manifest = dict[str, Any]

_READ_SECONDS = 60
# The path of each resource that is read, by its plural name.
_PATHS = {
    "configmaps": "/api/v1/namespaces/{namespace}/configmaps",
    "deployments": "/apis/apps/v1/namespaces/{namespace}/deployments",
    "endpointslices": "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
    "events": "/apis/events.k8s.io/v1/namespaces/{namespace}/events",
    "leases": "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
    "llmclients": "/apis/serving.quire.dev/v1alpha1/namespaces/{namespace}/llmclients",
    "llmexternalbackends": "/apis/serving.quire.dev/v1alpha1/namespaces/{namespace}/llmexternalbackends",
    "llmdeployments": "/apis/serving.quire.dev/v1alpha1/namespaces/{namespace}/llmdeployments",
    "llmroutes": "/apis/serving.quire.dev/v1alpha1/namespaces/{namespace}/llmroutes",
    "networkpolicies": "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    "nodes": "/api/v1/nodes",
    "persistentvolumeclaims": "/api/v1/namespaces/{namespace}/persistentvolumeclaims",
    "persistentvolumes": "/api/v1/persistentvolumes",
    "poddisruptionbudgets": "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
    "pods": "/api/v1/namespaces/{namespace}/pods",
    "replicasets": "/apis/apps/v1/namespaces/{namespace}/replicasets",
    "resourcequotas": "/api/v1/namespaces/{namespace}/resourcequotas",
    "serviceaccounts": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "secrets": "/api/v1/namespaces/{namespace}/secrets",
    "services": "/api/v1/namespaces/{namespace}/services",
}


class KubectlError(Exception):
    """kubectl or helm ended with an error, or a read was refused; the message is what was said."""


@dataclass(frozen=True)
class Kubectl:
    """One cluster, and the programs with which it is reached."""

    bin: Path
    kubeconfig: Path

    def argv(self, *args: str) -> list[str]:
        """The command line of one kubectl call."""
        return [str(self.bin / "kubectl"), f"--kubeconfig={self.kubeconfig}", *args]

    def run(self, *args: str, stdin: str | None = None) -> str:
        """Runs kubectl and returns its standard output; raises KubectlError with its words."""
        return _run(self.argv(*args), stdin)

    def helm(self, *args: str, stdin: str | None = None) -> str:
        """Runs helm, likewise."""
        return _run(self.helm_argv(*args), stdin)

    def helm_argv(self, *args: str) -> list[str]:
        """The command line of one helm call."""
        return [str(self.bin / "helm"), f"--kubeconfig={self.kubeconfig}", *args]

    def apply(self, *manifests: Manifest) -> None:
        """Applies manifests."""
        self.run("apply", "-f", "-", stdin="\n---\n".join(json.dumps(manifest) for manifest in manifests))

    def get(self, resource: str, name: str, namespace: str = "") -> Manifest | None:
        """One object, or None; `resource` is a plural, such as "pods"."""
        return self._read(f"{_path(resource, namespace)}/{name}")

    def list(self, resource: str, namespace: str, selector: str = "") -> list[Manifest]:
        """The objects of a resource, where given those with labels."""
        path = f"{_path(resource, namespace)}?{urlencode({'labelSelector': selector})}"
        found = self._read(path)
        assert found is not None, f"{path} names no object"
        items: list[Manifest] = found["items"]
        return items

    def _read(self, path: str) -> Manifest | None:
        """The JSON at `path`, or None if that is an object that does not exist."""
        connection = _UnixConnection(self._proxy)
        try:
            connection.request("GET", path, headers={"Accept": "application/json"})
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise KubectlError(f"GET {path}: {error}") from error
        finally:
            connection.close()
        if response.status == 404 and b'"kind":"Status"' in body and json.loads(body)["details"].get("name"):
            return None
        if response.status != 200:
            raise KubectlError(f"GET {path}: {response.status} {body.decode(errors='replace').strip()}")
        found: Manifest = json.loads(body)
        return found

    @cached_property
    def _proxy(self) -> Path:
        """The socket of a `kubectl proxy`, which ends with this process."""
        directory = Path(tempfile.mkdtemp(prefix="kubectl-proxy-"))
        path = directory / "socket"
        argv = self.argv("proxy", f"--unix-socket={path}")
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        def end() -> None:
            process.terminate()
            process.wait()
            shutil.rmtree(directory, ignore_errors=True)

        atexit.register(end)
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said.startswith("Starting to serve"):
            raise KubectlError(f"kubectl proxy: {(said + process.stdout.read()).strip()}")
        return path

    def patch(self, kind: str, name: str, namespace: str, patch: Manifest) -> Manifest:
        """One merge patch; the object that it made."""
        how = ("--type=merge", f"--patch={json.dumps(patch)}", "--output=json")
        patched: Manifest = json.loads(self.run("patch", kind, name, "-n", namespace, *how))
        return patched

    def delete(self, kind: str, name: str, namespace: str, *flags: str) -> None:
        """Deletes one object if it is there, and waits unless a flag says otherwise."""
        self.run("delete", kind, name, "-n", namespace, "--ignore-not-found", *flags)


def _run(argv: list[str], stdin: str | None) -> str:
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        raise KubectlError(f"{Path(argv[0]).name} {' '.join(argv[2:])}: {said}")
    return done.stdout


def _path(resource: str, namespace: str) -> str:
    if resource not in _PATHS:
        raise ValueError(f"no path is known for {resource!r}: see _PATHS")
    return _PATHS[resource].format(namespace=namespace)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket of this machine."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_READ_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_READ_SECONDS)
        self.sock.connect(str(self._path))
