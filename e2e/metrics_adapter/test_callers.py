"""Which clients get an answer: the API server for its users, holders of tokens with the right, and no
others.
"""

from __future__ import annotations

import httpx
import pytest

from e2e.metrics_adapter.cluster import Cluster, path
from e2e.metrics_adapter.engines import says
from e2e.metrics_adapter.replica import AdapterReplica
from e2e.operator import rights
from e2e.operator.world import OPERATOR_NAMESPACE

pytestmark = pytest.mark.api

RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}"


@pytest.fixture
def place(cluster: Cluster, adapter: AdapterReplica, namespace: str) -> str:
    """The path of a metric that has a value."""
    cluster.engine(namespace, "chat", says(queue=4))
    cluster.wait_value(namespace, "chat", "4")
    return path(namespace, "chat")


def test_unauthenticated_requests_get_401(cluster: Cluster, adapter: AdapterReplica, place: str) -> None:
    trusted = cluster.bundle()
    for asked in (place, "/apis", "/apis/custom.metrics.k8s.io/v1beta2", "/nowhere"):
        answer = adapter.get(asked, trusted)
        assert (answer.status_code, answer.json()["reason"]) == (401, "Unauthorized"), asked


def test_front_proxy_headers_are_accepted_only_with_the_front_proxy_certificate(
    cluster: Cluster, adapter: AdapterReplica, place: str
) -> None:
    """The administrator's certificate is of the same authority here, but has another name."""
    keys = cluster.server.directory / "pki"
    headers = {"X-Remote-User": "system:admin", "X-Remote-Group": "system:masters"}
    admin, proxy = ((str(keys / f"{n}.crt"), str(keys / f"{n}.key")) for n in ("admin", "front-proxy"))
    trusted = cluster.bundle()

    assert adapter.get(place, trusted, headers=headers).status_code == 401
    assert adapter.get(place, trusted, headers=headers, certificate=[admin]).status_code == 401
    assert adapter.get(place, trusted, certificate=[proxy]).status_code == 401
    assert adapter.get(place, trusted, headers=headers, certificate=[proxy]).status_code == 200


def test_a_bearer_token_is_authorized_by_the_rights_of_its_service_account(
    cluster: Cluster, adapter: AdapterReplica, namespace: str, place: str
) -> None:
    cluster.world.create("ServiceAccount", OPERATOR_NAMESPACE, {"metadata": {"name": namespace}})
    token = rights.token(cluster.world, namespace)
    headers, trusted = {"Authorization": f"Bearer {token}"}, cluster.bundle()

    denied = adapter.get(place, trusted, headers=headers)
    assert (denied.status_code, denied.json()["reason"]) == (403, "Forbidden")
    assert f"system:serviceaccount:{OPERATOR_NAMESPACE}:{namespace}" in denied.json()["message"]
    _grant(cluster, namespace)
    other = path(namespace, "chat", "llm_running_requests")  # what was denied is remembered for a while
    assert adapter.get(other, trusted, headers=headers).status_code == 200
    assert adapter.get(other, trusted, headers={"Authorization": "Bearer x.y.z"}).status_code == 401


def test_the_api_is_read_only(cluster: Cluster, adapter: AdapterReplica, place: str) -> None:
    done = cluster.kubectl("delete", "--raw", place)

    assert done.returncode != 0
    assert "can only be read" in done.stderr


def test_the_serving_certificate_is_signed_by_the_authority_in_the_ca_bundle_only(
    cluster: Cluster, adapter: AdapterReplica, place: str
) -> None:
    assert adapter.get(place, cluster.bundle("v1beta1")).status_code == 401
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        adapter.get(place, (cluster.server.directory / "pki" / "ca.crt").read_bytes())


def _grant(cluster: Cluster, namespace: str) -> None:
    base = RBAC.format(namespace)
    metrics = ("llm_queue_depth", "llm_running_requests")
    rule = {
        "apiGroups": ["custom.metrics.k8s.io"],
        "resources": [f"llmdeployments.serving.quire.dev/{metric}" for metric in metrics],
        "verbs": ["get"],
    }
    cluster.world.client.request("POST", f"{base}/roles", {"metadata": {"name": "load"}, "rules": [rule]})
    subject = {"kind": "ServiceAccount", "name": namespace, "namespace": OPERATOR_NAMESPACE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "load"}
    binding = {"metadata": {"name": "load"}, "subjects": [subject], "roleRef": role}
    cluster.world.client.request("POST", f"{base}/rolebindings", binding)
