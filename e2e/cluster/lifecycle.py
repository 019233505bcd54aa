"""`up`, `down` and `status`: the order in which a node's programs start, and the checks that they are ready.

What is started is decided in `control_plane` and `node`; how it is
taken away, in `teardown`.
"""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from e2e.cluster import (
    cgroups,
    claims,
    control_plane,
    dns,
    host,
    lws,
    mounts,
    network,
    node,
    pause,
    pki,
    process,
    programs,
)
from e2e.cluster.client import Client, wait_until
from e2e.cluster.errors import NotReadyError
from e2e.cluster.layout import Checkout, Cluster
from e2e.cluster.teardown import sweep, teardown

Command = Callable[[Cluster], list[str]]

# Everything that runs, in the order of starting. The first two are Debian's: they need no program of ours.
_IMAGES: dict[str, Command] = {"containerd": node.containerd, "registry": node.registry}
_FIRST: dict[str, Command] = {
    "etcd": lambda cluster: control_plane.etcd(cluster.checkout.bin, cluster.checkout.etcd),
    "kube-apiserver": control_plane.cluster_api_server,
}
_THEN: dict[str, Command] = {
    "kubelet": node.kubelet,
    "kube-controller-manager": control_plane.controller_manager,
    "kube-scheduler": control_plane.scheduler,
    "kube-proxy": node.proxy,
    "coredns": node.coredns,
}
_LWS = "lws"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_WEBHOOKS = "/apis/admissionregistration.k8s.io/v1"
# Of a further node, with its number behind the names.
_OF_OTHERS: dict[str, Command] = {
    "containerd": node.containerd,
    "kubelet": node.kubelet,
    "kube-proxy": node.proxy,
}


def up(root: Path, nodes: int | None = None) -> Cluster:
    """Brings the checkout's cluster of so many nodes up, or finds that it is; repairs whatever an earlier one
    left. `nodes`: None for as many as it has, and one where there is none.

    The caller says what that changes on the host (`plan`) first.
    """
    host.require_root()
    checkout = Checkout.at(root)
    with claims.lock(checkout):
        wanted = claims.num_nodes(checkout) if nodes is None else nodes
        if is_healthy(checkout, wanted):
            print("the cluster is up already", flush=True)
            return claims.current(root)
        host.install(host.missing_packages())
        programs.build(checkout.bin, programs.of_cluster(wanted))
        began = time.monotonic()
        cluster = _with_registry(checkout, wanted)
        _start(cluster, began)
        return cluster


def start_registry(root: Path, nodes: int | None = None) -> None:
    """The part of `up` that takes a second, so that images are pushed while programs are still compiled."""
    host.require_root()
    checkout = Checkout.at(root)
    with claims.lock(checkout):
        wanted = claims.num_nodes(checkout) if nodes is None else nodes
        if not is_healthy(checkout, wanted):
            host.install(host.missing_packages())
            _with_registry(checkout, wanted)


def setup(checkout: Checkout) -> None:
    """The packages, and the programs of the cluster and of all tests; nothing runs."""
    host.install(host.missing_packages())
    programs.build(checkout.bin)


def down(root: Path) -> None:
    """Takes the checkout's cluster away, and what dead clusters left."""
    host.require_root()
    checkout = Checkout.at(root)
    with claims.lock(checkout):
        began = time.monotonic()
        teardown(checkout)
        sweep(checkout)
        print(f"the cluster is down ({time.monotonic() - began:.1f} s)", flush=True)


def status(root: Path) -> str:
    """What runs, in words."""
    checkout = Checkout.at(root)
    records = process.recorded(checkout.records)
    if not records:
        return "the cluster is down"
    lines = [
        f"{record.name:<24} {f'pid {record.pid}' if process.is_alive(record) else 'dead'}"
        for record in records
    ]
    lines.append(f"healthy: {'yes' if is_healthy(checkout) else 'no (run `make up` again)'}")
    if checkout.kubeconfig.exists():
        cluster = claims.current(root)
        lines.append(
            f"API {cluster.url}, kubeconfig {cluster.kubeconfig}, registry {cluster.registry} in its network"
        )
        lines.append(f"enter its network: {' '.join(cluster.in_netns(['bash']))}")
    return "\n".join(lines)


def is_healthy(checkout: Checkout, nodes: int | None = None) -> bool:
    """Whether everything that `up` starts is alive and every node says Ready. `nodes`: how many there have to
    be; None for as many as were asked for.
    """
    if not checkout.claim.exists() or not checkout.kubeconfig.exists():
        return False
    cluster = claims.current(checkout.root)
    if nodes not in (None, cluster.addresses.nodes):
        return False
    alive = {r.name for r in process.recorded(checkout.records) if process.is_alive(r)}
    others = {_name_of(other, name) for other in cluster.others for name in _OF_OTHERS}
    others |= {_LWS} if others else set()
    if alive != {*_IMAGES, *_FIRST, *_THEN, *others}:
        return False
    client = Client(cluster.url, checkout.pki)
    return client.is_ready() and all(client.node_is_ready(one.name) for one in (cluster, *cluster.others))


def _name_of(other: Cluster, name: str) -> str:
    return f"{name}-{other.checkout.node}"


def _with_registry(checkout: Checkout, nodes: int) -> Cluster:
    """The checkout's cluster of containerd and the registry alone; anything else is taken away first."""
    records = process.recorded(checkout.records)
    if {record.name for record in records} == {*_IMAGES} and all(map(process.is_alive, records)):
        cluster = claims.with_registry(checkout)
        if cluster.addresses.nodes == nodes and _is_configured(cluster) and _answers(_to_registry(cluster)):
            return cluster
    teardown(checkout)
    for dead in sweep(checkout):
        print(f"cleaned what the dead cluster of {dead.root} left", flush=True)
    cluster = claims.claim(checkout, nodes)
    _prepare(cluster)
    for name, command in _IMAGES.items():
        _run(cluster, name, command)
    argv = _to_registry(cluster)
    wait_until("the registry", lambda: _answers(argv), seconds=30, death=lambda: first_death(checkout))
    return cluster


def _to_registry(cluster: Cluster) -> list[str]:
    """A command that asks the registry for its version."""
    ask = f"import urllib.request as r; r.urlopen('http://{node.REGISTRY_ADDRESS}/v2/', timeout=5)"
    return cluster.in_netns([sys.executable, "-c", ask])


def _is_configured(cluster: Cluster) -> bool:
    """Whether the configuration files are as this code writes them."""
    paths = {cluster.checkout.config / name: content for name, content in node.files(cluster).items()}
    return all(path.exists() and path.read_text() == content for path, content in paths.items())


def _prepare(cluster: Cluster) -> None:
    """Everything that is there before the first process."""
    checkout = cluster.checkout
    shutil.rmtree(checkout.log, ignore_errors=True)
    _make_directories(checkout)
    checkout.registry.mkdir(exist_ok=True)
    (checkout.state / "run").symlink_to(checkout.run)
    host.load_bridge_module()
    network.create(cluster)
    cgroups.create(checkout.cgroup)
    authority = pki.Authority(checkout.pki)
    kubelets = map(node.identity, (cluster, *cluster.others))
    of_groups = [lws.identity(cluster.node_ip)] if cluster.others else []
    for identity in (*control_plane.identities(cluster), *kubelets, *of_groups):
        authority.issue(identity)
    authority.issue_token_key()
    _write_files(cluster, node.files(cluster))


def _make_directories(checkout: Checkout) -> None:
    """Those of one node."""
    for directory in (
        checkout.pod_logs,
        checkout.pod_files,
        checkout.kubelet,
        checkout.containerd,
        checkout.config,
    ):
        directory.mkdir(parents=True, exist_ok=True)
    mounts.bind(checkout.pod_files, checkout.kubelet)


def _write_files(cluster: Cluster, files: Mapping[str, str]) -> None:
    """The configuration of one node."""
    config = cluster.checkout.config
    for name, content in files.items():
        (config / name).parent.mkdir(parents=True, exist_ok=True)
        (config / name).write_text(content)
    node.cni_path(cluster).parent.mkdir()
    node.cni_path(cluster).symlink_to(config / "10-quire.conflist")


def _start_groups(cluster: Cluster, client: Client) -> None:
    """LeaderWorkerSet, which several nodes are there for: its CRDs, its webhooks and its controller."""
    checkout = cluster.checkout
    certificates = checkout.config / "lws"
    certificates.mkdir(exist_ok=True)
    for suffix in ("crt", "key"):
        shutil.copy(checkout.pki / f"lws.{suffix}", certificates / f"tls.{suffix}")
    (checkout.config / "lws.json").write_text(
        lws.configuration(cluster.node_ip, lws.WEBHOOK_PORT, certificates)
    )
    (checkout.config / "lws.kubeconfig").write_text(pki.kubeconfig(checkout.pki, "lws", cluster.url))
    for crd in lws.crds():
        client.apply(f"{_CRDS}/{crd['metadata']['name']}", crd)
    url = f"https://{cluster.node_ip}:{lws.WEBHOOK_PORT}"
    for document in lws.webhooks(url, checkout.pki / "ca.crt"):
        plural = f"{document['kind'].lower()}s"
        client.apply(f"{_WEBHOOKS}/{plural}/{document['metadata']['name']}", document)
    _run(cluster, _LWS, _lws)


def _lws(cluster: Cluster) -> list[str]:
    config = cluster.checkout.config
    return lws.command(cluster.checkout.bin, config / "lws.json", config / "lws.kubeconfig")


def _start_other(first: Cluster, other: Cluster, death: Callable[[], str | None]) -> None:
    """A further node: its network, its containerd with the pause image, its kubelet and kube-proxy."""
    _make_directories(other.checkout)
    network.join(first, other)
    cgroups.create(other.checkout.cgroup)
    _write_files(other, node.files_of_other(other))
    _run(other, _name_of(other, "containerd"), node.containerd)
    _prepare_images(other, death)
    for name, command in _OF_OTHERS.items():
        if name != "containerd":
            _run(other, _name_of(other, name), command)


def _start(cluster: Cluster, began: float) -> None:
    checkout = cluster.checkout

    def report(what: str) -> None:
        print(f"  {what} after {time.monotonic() - began:.1f} s", flush=True)

    def death() -> str | None:
        return first_death(checkout)

    for name, command in _FIRST.items():
        _run(cluster, name, command)
    _prepare_images(cluster, death)
    client = Client(cluster.url, checkout.pki)
    wait_until("the API server", client.is_ready, seconds=90, death=death)
    report("API server ready")
    for name, command in _THEN.items():
        _run(cluster, name, command)
    kube_system = "/api/v1/namespaces/kube-system"
    wait_until("kube-system", lambda: client.exists(kube_system), seconds=30, death=death)
    for path, manifest in dns.manifests(cluster):
        client.apply(path, manifest)
    for other in cluster.others:
        _start_other(cluster, other, death)
    if cluster.others:
        _start_groups(cluster, client)
    for one in (cluster, *cluster.others):
        wait_until(one.name, partial(client.node_is_ready, one.name), seconds=90, death=death)
        report(f"{one.name} Ready")
    account = "/api/v1/namespaces/default/serviceaccounts/default"
    wait_until("the default ServiceAccount", lambda: client.exists(account), seconds=30, death=death)
    wait_until("DNS", lambda: _dns_is_ready(cluster), seconds=30, death=death)
    report("DNS ready")
    # Written last: who finds it finds a cluster that works.
    new = checkout.config / "admin-outside.kubeconfig"
    new.write_text(pki.kubeconfig(checkout.pki, "admin", cluster.url))
    new.rename(checkout.kubeconfig)


def first_death(checkout: Checkout) -> str | None:
    """A recorded process that ended by itself, with its last words."""
    for record in process.recorded(checkout.records):
        if not process.is_alive(record):
            log = checkout.log / f"{record.name}.log"
            return f"{record.name} ended:\n{log.read_text(errors='replace')[-2000:]}"
    return None


def _run(cluster: Cluster, name: str, command: Command) -> None:
    checkout = cluster.checkout
    process.start(checkout.records, name, cluster.in_netns(command(cluster)), checkout.log / f"{name}.log")


def _prepare_images(cluster: Cluster, death: Callable[[], str | None]) -> None:
    """An image store that has the pause image and no containers of an earlier life."""
    checkout = cluster.checkout
    name = "containerd" if checkout.node == 1 else _name_of(cluster, "containerd")
    wait_until("containerd", lambda: _answers(node.ctr(cluster, "version")), seconds=30, death=death)
    old = _output(node.ctr(cluster, "containers", "list", "--quiet")).split()
    if old:
        # The kubelet would take them for pods of its own. containerd, restarted, knows them no more.
        _output(node.ctr(cluster, "containers", "delete", *old))
        process.stop([r for r in process.recorded(checkout.records) if r.name == name], grace_seconds=5)
        (checkout.records / name).unlink()
        _run(cluster, name, node.containerd)
        wait_until("containerd", lambda: _answers(node.ctr(cluster, "version")), seconds=30, death=death)
    image = checkout.config / "pause.tar"
    image.write_bytes(pause.archive(checkout.bin / "pause", node.PAUSE_IMAGE))
    _output(node.ctr(cluster, "images", "import", str(image)))


def _dns_is_ready(cluster: Cluster) -> bool:
    try:
        with socket.create_connection((cluster.node_ip, node.DNS_READY_PORT), timeout=1) as connection:
            connection.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
            return b" 200 " in connection.recv(100)
    except OSError:
        return False


def _answers(argv: list[str]) -> bool:
    return subprocess.run(argv, capture_output=True, env={"PATH": process.PROGRAM_PATH}).returncode == 0


def _output(argv: list[str]) -> str:
    run = subprocess.run(argv, capture_output=True, text=True, env={"PATH": process.PROGRAM_PATH})
    if run.returncode != 0:
        raise NotReadyError(f"{' '.join(argv)}: {run.stderr.strip()}")
    return run.stdout
