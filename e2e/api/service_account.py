"""A ServiceAccount with a Role, and the directory with its token that the kubelet would mount."""

from __future__ import annotations

from pathlib import Path

from e2e.api.client import Client
from e2e.api.specs import Body


def mounted(api: Client, namespace: str, name: str, rules: list[Body], directory: Path) -> Path:
    """Create the account; the directory, with the token and the CA in it."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    api.request("POST", path, {"metadata": {"name": name}})
    api.request("POST", f"{rbac}/roles", {"metadata": {"name": name}, "rules": rules})
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }
    api.request("POST", f"{rbac}/rolebindings", binding)
    token = api.request("POST", f"{path}/{name}/token", {"spec": {"expirationSeconds": 3600}})
    (directory / "token").write_text(token["status"]["token"])
    (directory / "ca.crt").write_bytes(api.authority.read_bytes())
    return directory
