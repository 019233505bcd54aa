"""The command lines of etcd, kube-apiserver, kube-controller-manager and kube-scheduler.

Pure: `up` and `apiserver.ApiServer` start what these functions return.
"""

from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from e2e.cluster.layout import API_PORT, Cluster
from e2e.cluster.pki import Identity, admin_identity, api_server_identity

ETCD_URL = "http://127.0.0.1:2379"
ETCD_PEER_URL = "http://127.0.0.1:2380"

# The node's own programs would fill the log with reads; what they change is recorded, and so is all that
# anyone else does.
_SYSTEM_USERS = [
    "system:apiserver",
    "system:coredns",
    "system:kube-controller-manager",
    "system:kube-proxy",
    "system:kube-scheduler",
]
AUDIT_POLICY: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "nonResourceURLs": ["/healthz*", "/livez*", "/readyz*", "/openapi*", "/version"]},
        {"level": "None", "users": _SYSTEM_USERS, "verbs": ["get", "list", "watch"]},
        {
            "level": "None",
            "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"],
            "verbs": ["get", "list", "watch"],
        },
        {"level": "Metadata"},
    ],
}


def identities(cluster: Cluster) -> tuple[Identity, ...]:
    """Everyone who speaks to the API server of a full cluster, and the server itself."""
    addresses = cluster.addresses
    return (
        api_server_identity([cluster.node_ip, str(addresses.api_service_ip)]),
        admin_identity(),
        Identity("controller-manager", "system:kube-controller-manager"),
        Identity("scheduler", "system:kube-scheduler"),
        Identity("proxy", "system:kube-proxy"),
        Identity("coredns", "system:coredns"),
        Identity("kubelet-client", "quire-apiserver", groups=("system:masters",)),
        front_proxy_identity(),
    )


def etcd(
    bin_dir: Path, data: Path, *, client_url: str = ETCD_URL, peer_url: str = ETCD_PEER_URL
) -> list[str]:
    """One member, whose data need not survive the machine."""
    return [
        str(bin_dir / "etcd"),
        f"--data-dir={data}",
        f"--listen-client-urls={client_url}",
        f"--advertise-client-urls={client_url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=default={peer_url}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


@dataclass(frozen=True)
class ApiServerSettings:
    """What differs between the server of a full cluster and one without a node."""

    bin_dir: Path
    pki: Path
    etcd_url: str
    bind_address: str
    port: int
    services: IPv4Network
    extra: tuple[str, ...]


def api_server(settings: ApiServerSettings) -> list[str]:
    """What every API server of ours is started with, plus `settings.extra`."""
    pki = settings.pki
    return [
        str(settings.bin_dir / "kube-apiserver"),
        f"--etcd-servers={settings.etcd_url}",
        f"--bind-address={settings.bind_address}",
        f"--secure-port={settings.port}",
        f"--service-cluster-ip-range={settings.services}",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged=true",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        "--profiling=false",
        *settings.extra,
    ]


def front_proxy_identity() -> Identity:
    """As whom the API server speaks for its callers to aggregated APIs."""
    return Identity("front-proxy", "front-proxy-client")


def front_proxy(pki: Path) -> tuple[str, ...]:
    """The flags with which the API server does so."""
    return (
        f"--requestheader-client-ca-file={pki}/ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki}/front-proxy.crt",
        f"--proxy-client-key-file={pki}/front-proxy.key",
    )


def cluster_api_server(cluster: Cluster) -> list[str]:
    """The API server of a full cluster: kubelet, aggregation and audit besides."""
    checkout = cluster.checkout
    pki = checkout.pki
    settings = ApiServerSettings(
        bin_dir=checkout.bin,
        pki=pki,
        etcd_url=ETCD_URL,
        bind_address="0.0.0.0",
        port=API_PORT,
        services=cluster.addresses.services,
        extra=(
            f"--advertise-address={cluster.node_ip}",
            "--enable-admission-plugins=NodeRestriction",
            f"--kubelet-client-certificate={pki}/kubelet-client.crt",
            f"--kubelet-client-key={pki}/kubelet-client.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            # Aggregated APIs (the metrics adapter) and webhooks are reached at their pods: the server needs
            # no Service IP.
            "--enable-aggregator-routing=true",
            *front_proxy(pki),
            f"--audit-policy-file={checkout.config}/audit-policy.json",
            f"--audit-log-path={checkout.audit_log}",
            # Stories count writes: an answered request must be in the log already.
            "--audit-log-mode=blocking",
        ),
    )
    return api_server(settings)


def controller_manager(cluster: Cluster) -> list[str]:
    """All controllers, with an autoscaler and a binder that look often enough for a test."""
    pki = cluster.checkout.pki
    kubeconfig = cluster.checkout.config / "controller-manager.kubeconfig"
    return [
        str(cluster.checkout.bin / "kube-controller-manager"),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        "--allocate-node-cidrs=true",
        f"--cluster-cidr={cluster.addresses.all_pods}",
        f"--node-cidr-mask-size={cluster.addresses.pods.prefixlen}",
        f"--service-cluster-ip-range={cluster.addresses.services}",
        "--horizontal-pod-autoscaler-sync-period=3s",
        # A claim that meets its volume before the binder knows both waits for the next round (default: 15 s).
        "--pvclaimbinder-sync-period=1s",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
    ]


def scheduler(cluster: Cluster) -> list[str]:
    """The default scheduler."""
    kubeconfig = cluster.checkout.config / "scheduler.kubeconfig"
    return [
        str(cluster.checkout.bin / "kube-scheduler"),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",
    ]
