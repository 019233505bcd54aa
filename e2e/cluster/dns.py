"""The cluster's DNS as objects: a Service at the well-known address whose endpoint is the node's CoreDNS
process.

`lifecycle` applies them. No selector and no pod: DNS needs no image and answers before the first pod asks.
"""

from typing import Any

from e2e.cluster.layout import Cluster

Manifest = dict[str, Any]
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_NAMESPACE = "/api/v1/namespaces/kube-system"
_SLICES = "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices"
_LABELS = {"k8s-app": "kube-dns", "kubernetes.io/name": "CoreDNS"}


def manifests(cluster: Cluster) -> tuple[tuple[str, Manifest], ...]:
    """Each object with the path at which it is applied."""
    return (
        (f"{_RBAC}/clusterroles/system:coredns", _role()),
        (f"{_RBAC}/clusterrolebindings/system:coredns", _role_binding()),
        (f"{_NAMESPACE}/services/kube-dns", _service(cluster)),
        (f"{_SLICES}/kube-dns", _endpoints(cluster)),
    )


def _role() -> Manifest:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "system:coredns"},
        "rules": [
            {"apiGroups": [""], "resources": ["services", "namespaces"], "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        ],
    }


def _role_binding() -> Manifest:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "system:coredns"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:coredns"}],
    }


def _service(cluster: Cluster) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": _LABELS},
        "spec": {
            "clusterIP": str(cluster.addresses.dns_ip),
            "ports": [
                {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 53},
                {"name": "dns-tcp", "port": 53, "protocol": "TCP", "targetPort": 53},
            ],
        },
    }


def _endpoints(cluster: Cluster) -> Manifest:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns",
            "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [cluster.node_ip], "conditions": {"ready": True}}],
        "ports": [
            {"name": "dns", "port": 53, "protocol": "UDP"},
            {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
        ],
    }
