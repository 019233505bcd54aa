"""The node's configuration files and command lines: containerd, CNI, kubelet, kube-proxy, CoreDNS, registry.

Pure: `lifecycle` writes what `files` returns and starts what `commands` returns. What bites is said where it
is set.
"""

import json
from pathlib import Path
from typing import Any

from e2e.cluster import host
from e2e.cluster.control_plane import AUDIT_POLICY
from e2e.cluster.layout import API_PORT, REGISTRY, Cluster
from e2e.cluster.pki import Identity, kubeconfig

PAUSE_IMAGE = "localhost/quire-pause:1"
REGISTRY_PORT = 5000
REGISTRY_ADDRESS = f"127.0.0.1:{REGISTRY_PORT}"
DNS_READY_PORT = 8181
_CLIENTS = ("admin", "controller-manager", "scheduler", "kubelet", "proxy", "coredns")


def identity(cluster: Cluster) -> Identity:
    """The kubelet, as client and as server."""
    return Identity(
        _kubelet_name(cluster),
        f"system:node:{cluster.name}",
        groups=("system:nodes",),
        serves=("127.0.0.1", cluster.node_ip, cluster.name),
    )


def _kubelet_name(cluster: Cluster) -> str:
    number = cluster.checkout.node
    return "kubelet" if number == 1 else f"kubelet-{number}"


def files_of_other(cluster: Cluster) -> dict[str, str]:
    """What a further node's configuration consists of, by file name. Images it pulls from the first node's
    registry, under the name that they have there.
    """
    checkout = cluster.checkout
    registry = f"http://{cluster.addresses.of_node(1).wire_ip}:{REGISTRY_PORT}"
    mirror = f'server = "{registry}"\n[host."{registry}"]\n  capabilities = ["pull", "resolve"]\n'
    return {
        "kubelet.kubeconfig": kubeconfig(checkout.pki, _kubelet_name(cluster), cluster.url),
        "proxy.kubeconfig": kubeconfig(checkout.pki, "proxy", cluster.url),
        "containerd.toml": containerd_config(cluster),
        f"registries/{REGISTRY}/hosts.toml": mirror,
        "10-quire.conflist": json.dumps(cni_config(cluster)),
        "kubelet.json": json.dumps(kubelet_config(cluster)),
        "kube-proxy.json": json.dumps(proxy_config(cluster)),
        "resolv.conf": f"nameserver {cluster.addresses.dns_ip}\n",
    }


def files(cluster: Cluster) -> dict[str, str]:
    """Everything that goes to `.cluster/config`, by file name."""
    checkout = cluster.checkout
    clients = {
        f"{user}.kubeconfig": kubeconfig(checkout.pki, user, f"https://127.0.0.1:{API_PORT}")
        for user in _CLIENTS
    }
    return {
        **clients,
        "audit-policy.json": json.dumps(AUDIT_POLICY),
        "containerd.toml": containerd_config(cluster),
        "10-quire.conflist": json.dumps(cni_config(cluster)),
        "kubelet.json": json.dumps(kubelet_config(cluster)),
        "kube-proxy.json": json.dumps(proxy_config(cluster)),
        "Corefile": corefile(cluster),
        "registry.json": json.dumps(registry_config(cluster)),
        "resolv.conf": f"nameserver {cluster.addresses.dns_ip}\n",
    }


def containerd_config(cluster: Cluster) -> str:
    """containerd 1.x reads it, 2.x migrates it by itself."""
    checkout = cluster.checkout
    return f"""\
version = 2
root = "{checkout.containerd}"
state = "{checkout.run}/containerd"
# opt would make /opt/containerd; the others are snapshotters that nothing here uses
disabled_plugins = [
  "io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "{checkout.socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  disable_apparmor = true
  # Without CAP_SYS_RESOURCE nothing may lower its score.
  restrict_oom_score_adj = true
  # Pods' network namespaces lie with our other mounts, where `down` finds them.
  netns_mounts_under_state_dir = true
{_mirrors(cluster)}\
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{host.cni_dir()}"
    conf_dir = "{checkout.run}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    # An image of 5 GB need not lie here twice, packed and unpacked; its layers are found again by their
    # snapshots.
    discard_unpacked_layers = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""


def _mirrors(cluster: Cluster) -> str:
    """Where a further node finds the images of the first one's registry."""
    if cluster.checkout.node == 1:
        return ""
    section = '[plugins."io.containerd.grpc.v1.cri".registry]'
    return f'  {section}\n    config_path = "{cluster.checkout.config}/registries"\n'


def cni_config(cluster: Cluster) -> dict[str, Any]:
    """One bridge inside the node's namespace. Pods are seen under their own addresses everywhere: the nodes
    and the host have routes to them.
    """
    checkout = cluster.checkout
    return {
        "cniVersion": "1.0.0",
        "name": checkout.cni_network,
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": str(cluster.addresses.pods)}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                    "dataDir": str(checkout.run / "cni-addresses"),
                },
            },
        ],
    }


def kubelet_config(cluster: Cluster) -> dict[str, Any]:
    """A kubelet without systemd, on cgroup v1 or v2, that never evicts a test for a full disk."""
    checkout = cluster.checkout
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(checkout.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(checkout.pki / f"{_kubelet_name(cluster)}.crt"),
        "tlsPrivateKeyFile": str(checkout.pki / f"{_kubelet_name(cluster)}.key"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{checkout.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [str(cluster.addresses.dns_ip)],
        "clusterDomain": "cluster.local",
        "resolvConf": str(checkout.config / "resolv.conf"),
        "containerRuntimeEndpoint": f"unix://{checkout.socket}",
        "serializeImagePulls": False,
        "registryPullQPS": 0,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "evictionPressureTransitionPeriod": "10s",
        "makeIPTablesUtilChains": False,
        "maxPods": 110,
        "nodeStatusUpdateFrequency": "5s",
        "syncFrequency": "10s",
        "oomScoreAdj": 0,  # the default, -999, takes CAP_SYS_RESOURCE
        "podLogsDir": str(checkout.pod_logs),
        "volumePluginDir": str(checkout.kubelet / "volume-plugins"),
    }


def proxy_config(cluster: Cluster) -> dict[str, Any]:
    """Services by iptables rules inside the node's namespace."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": str(cluster.checkout.config / "proxy.kubeconfig")},
        "clusterCIDR": str(cluster.addresses.all_pods),
        "hostnameOverride": cluster.name,
        "oomScoreAdj": 0,
        # Zero leaves the host's connection tracking as it is.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        # A pod that drains should leave its Service at once.
        "iptables": {"minSyncPeriod": "0.1s"},
    }


def corefile(cluster: Cluster) -> str:
    """Names of the cluster; all others are refused at once, since there is nowhere to forward to."""
    return f"""\
cluster.local:53 in-addr.arpa:53 {{
    bind {cluster.node_ip}
    ready {cluster.node_ip}:{DNS_READY_PORT}
    errors
    cache 5
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {cluster.checkout.config}/coredns.kubeconfig
        ttl 5
    }}
}}
"""


def registry_config(cluster: Cluster) -> dict[str, Any]:
    """A registry that only the cluster's nodes reach."""
    return {
        "version": "0.1",
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {
            "filesystem": {"rootdirectory": str(cluster.checkout.registry)},
            "delete": {"enabled": True},
            "cache": {"blobdescriptor": "inmemory"},
        },
        "http": {"addr": REGISTRY_ADDRESS if cluster.addresses.nodes == 1 else f":{REGISTRY_PORT}"},
    }


def containerd(cluster: Cluster) -> list[str]:
    """containerd with the configuration above."""
    return ["containerd", "--config", str(cluster.checkout.config / "containerd.toml"), "--log-level", "warn"]


def registry(cluster: Cluster) -> list[str]:
    """Debian's docker-registry with the configuration above."""
    return ["docker-registry", "serve", str(cluster.checkout.config / "registry.json")]


def kubelet(cluster: Cluster) -> list[str]:
    """The kubelet with the configuration above."""
    checkout = cluster.checkout
    return [
        str(checkout.bin / "kubelet"),
        f"--config={checkout.config}/kubelet.json",
        f"--kubeconfig={checkout.config}/kubelet.kubeconfig",
        f"--hostname-override={cluster.name}",
        f"--node-ip={cluster.node_ip}",
        f"--root-dir={checkout.kubelet}",
        f"--cert-dir={checkout.kubelet}/pki",
    ]


def proxy(cluster: Cluster) -> list[str]:
    """kube-proxy with the configuration above."""
    return [str(cluster.checkout.bin / "kube-proxy"), f"--config={cluster.checkout.config}/kube-proxy.json"]


def coredns(cluster: Cluster) -> list[str]:
    """CoreDNS with the configuration above."""
    return [str(cluster.checkout.bin / "coredns"), "-conf", str(cluster.checkout.config / "Corefile")]


def ctr(cluster: Cluster, *arguments: str) -> list[str]:
    """containerd's own client, on the kubelet's images and containers."""
    return ["ctr", "--address", str(cluster.checkout.socket), "--namespace", "k8s.io", *arguments]


def cni_path(cluster: Cluster) -> Path:
    """Where containerd looks for the network's configuration."""
    return cluster.checkout.run / "cni" / "10-quire.conflist"
