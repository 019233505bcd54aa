"""`up`, `down` and `status`: the order in which a node's programs start, and the checks that they are ready.

What is started is decided in `control_plane` and `node`; how it is
taken away, in `teardown`.
"""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from e2e.cluster import (
    cgroups,
    claims,
    control_plane,
    dns,
    host,
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
from e2e.cluster.layout import NODE_NAME, Checkout, Cluster
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


def up(root: Path) -> Cluster:
    """Brings the checkout's cluster up, or finds that it is; repairs whatever an earlier one left.

    The caller says what that changes on the host (`plan`) first.
    """
    host.require_root()
    checkout = Checkout.at(root)
    with claims.lock(checkout):
        if is_healthy(checkout):
            print("the cluster is up already", flush=True)
            return claims.current(root)
        host.install(host.missing_packages())
        programs.build(checkout.bin, programs.OF_THE_NODE)
        began = time.monotonic()
        cluster = _with_registry(checkout)
        _start(cluster, began)
        return cluster


def start_registry(root: Path) -> None:
    """The part of `up` that takes a second, so that images are pushed while programs are still compiled."""
    host.require_root()
    checkout = Checkout.at(root)
    with claims.lock(checkout):
        if not is_healthy(checkout):
            host.install(host.missing_packages())
            _with_registry(checkout)


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


def is_healthy(checkout: Checkout) -> bool:
    """Whether everything that `up` starts is alive and the node says Ready."""
    if not checkout.claim.exists() or not checkout.kubeconfig.exists():
        return False
    alive = {r.name for r in process.recorded(checkout.records) if process.is_alive(r)}
    if alive != {*_IMAGES, *_FIRST, *_THEN}:
        return False
    client = Client(claims.current(checkout.root).url, checkout.pki)
    return client.is_ready() and client.node_is_ready(NODE_NAME)


def _with_registry(checkout: Checkout) -> Cluster:
    """The checkout's cluster of containerd and the registry alone; anything else is taken away first."""
    records = process.recorded(checkout.records)
    if {record.name for record in records} == {*_IMAGES} and all(map(process.is_alive, records)):
        cluster = claims.with_registry(checkout)
        if _is_configured(cluster) and _answers(_to_registry(cluster)):
            return cluster
    teardown(checkout)
    for dead in sweep(checkout):
        print(f"cleaned what the dead cluster of {dead.root} left", flush=True)
    cluster = claims.claim(checkout)
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
    needed = (
        checkout.pod_logs,
        checkout.pod_files,
        checkout.kubelet,
        checkout.containerd,
        checkout.registry,
        checkout.config,
    )
    for directory in needed:
        directory.mkdir(parents=True, exist_ok=True)
    (checkout.state / "run").symlink_to(checkout.run)
    mounts.bind(checkout.pod_files, checkout.kubelet)
    host.load_bridge_module()
    network.create(cluster)
    cgroups.create(checkout.cgroup)
    authority = pki.Authority(checkout.pki)
    for identity in (*control_plane.identities(cluster), node.identity(cluster)):
        authority.issue(identity)
    authority.issue_token_key()
    for name, content in node.files(cluster).items():
        (checkout.config / name).write_text(content)
    node.cni_path(cluster).parent.mkdir()
    node.cni_path(cluster).symlink_to(checkout.config / "10-quire.conflist")


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
    wait_until("the node", lambda: client.node_is_ready(NODE_NAME), seconds=90, death=death)
    report("node Ready")
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
    wait_until("containerd", lambda: _answers(node.ctr(cluster, "version")), seconds=30, death=death)
    old = _output(node.ctr(cluster, "containers", "list", "--quiet")).split()
    if old:
        # The kubelet would take them for pods of its own. containerd, restarted, knows them no more.
        _output(node.ctr(cluster, "containers", "delete", *old))
        process.stop(
            [r for r in process.recorded(checkout.records) if r.name == "containerd"], grace_seconds=5
        )
        (checkout.records / "containerd").unlink()
        _run(cluster, "containerd", node.containerd)
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
