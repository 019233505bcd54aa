"""The chart's ServiceAccount and RBAC on the test's API server, and a kubeconfig with these rights only."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path
from typing import Any

import yaml

from e2e import yaml_files
from e2e.cluster import programs
from e2e.cluster.apiserver import ApiServer
from e2e.operator.process import ROOT
from e2e.operator.world import OPERATOR_NAMESPACE, Body, World

# The values that have no default.
IMAGES = (
    "image.repository=registry.example/quire-operator,engineImage.repository=registry.example/quire-server"
)
PLURALS = {
    "ServiceAccount": "serviceaccounts",
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
    "Role": "roles",
    "RoleBinding": "rolebindings",
}


def rendered_chart(*arguments: str, release: str = "quire") -> list[Body]:
    """The chart's objects as Helm renders them."""
    programs.build(ROOT / ".cluster" / "bin", ("helm",))
    command = [str(ROOT / ".cluster" / "bin" / "helm"), "template", release, str(ROOT / "charts" / "quire")]
    command += ["--namespace", OPERATOR_NAMESPACE, "--kube-version", "1.34.0", "--set", IMAGES, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [body for body in yaml_files.load_all(done.stdout) if body]


def install(world: World, bodies: list[Body]) -> None:
    """The ServiceAccounts and the RBAC among `bodies`."""
    for body in bodies:
        if body["kind"] in PLURALS:
            version, namespace = body["apiVersion"], body["metadata"].get("namespace")
            base = f"/apis/{version}" if "/" in version else f"/api/{version}"
            where = f"/namespaces/{namespace}" if namespace else ""
            world.client.request("POST", f"{base}{where}/{PLURALS[body['kind']]}", body)


def token_kubeconfig(server: ApiServer, world: World, account: str, path: Path) -> Path:
    """Writes a kubeconfig with a token of `account` in the operator's namespace to `path`."""
    config = yaml_files.load(server.kubeconfig.read_text(encoding="utf-8"))
    cluster = config["clusters"][0]["cluster"]
    authority = Path(cluster.pop("certificate-authority")).read_bytes()
    cluster["certificate-authority-data"] = base64.b64encode(authority).decode()
    config["users"][0]["user"] = {"token": token(world, account)}
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def token(world: World, account: str, **spec: Any) -> str:
    """A token of `account` in the operator's namespace."""
    answer = world.client.request(
        "POST",
        f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/serviceaccounts/{account}/token",
        {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 7200, **spec},
        },
    )
    return str(answer["status"]["token"])
