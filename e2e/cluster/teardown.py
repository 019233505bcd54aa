"""Takes a cluster away, whatever state it is in: running, half started, killed, or left by a checkout that is
gone.

Every step finds what is there and may be repeated, so that `down`, a recovering `up` and the sweep of dead
clusters are this one function. It ends recorded processes, and what containerd and the kubelet made out of
them: shims by the address of our containerd, pods by our cgroup. Nothing else in the namespace is touched.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from e2e.cluster import cgroups, claims, host, mounts, network, process
from e2e.cluster.layout import MAX_NODES, RUN_ROOT, Checkout

# These write what survives; all others may stop where they are.
_KEEPERS = ("containerd", "registry")
_TOOLS = (b"unshare", b"nsenter", b"ip")
_CONTAINER_LOG_LINKS = Path("/var/log/containers")
_CNI_RESULTS = Path("/var/lib/cni/results")


def teardown(checkout: Checkout) -> None:
    """Removes processes, mounts, cgroups, interface and state; programs, images and registry stay."""
    checkout.kubeconfig.unlink(missing_ok=True)
    _stop_processes(checkout)
    for each in _nodes(checkout):
        _remove_shim_sockets(each)
    mounts.unmount_below(checkout.run)
    mounts.unmount_below(checkout.state)
    for each in _nodes(checkout):
        cgroups.remove(each.cgroup)
    network.remove_veth(checkout.veth)
    _remove_traces(checkout)
    for path in checkout.disposable:
        mounts.remove_tree(path)
    _release(checkout)


def sweep(own: Checkout) -> list[Checkout]:
    """Takes away the dead clusters of other checkouts; a living one is never touched."""
    swept = []
    for cluster in claims.claimed():
        other = cluster.checkout
        if other == own or not claims.is_dead(other):
            continue
        with claims.lock(other, wait=False) as locked:
            # A process that holds the lock is starting or stopping it right now.
            if locked and claims.is_dead(other):
                teardown(other)
                swept.append(other)
        # A deleted checkout could not lose its mount points, nor the lock that was just taken.
        with contextlib.suppress(OSError):
            if sorted(other.state.iterdir()) == [other.lock]:
                other.lock.unlink()
                other.state.rmdir()
                other.root.rmdir()
    return swept


def shims(checkout: Checkout, proc: Path = Path("/proc")) -> set[int]:
    """The containerd shims that belong to this checkout's containerd."""
    return {
        pid
        for pid, argv in _commands(proc)
        if _name(argv).startswith(b"containerd-shim")
        and any(str(each.socket).encode() in argv for each in _nodes(checkout))
    }


def tools(checkout: Checkout, proc: Path = Path("/proc")) -> set[int]:
    """Commands about this checkout's network that outlive an `up` that was killed: one may still mount."""
    run = str(checkout.run).encode()
    return {
        pid
        for pid, argv in _commands(proc)
        if _name(argv) in _TOOLS and any(run in argument for argument in argv)
    }


def _commands(proc: Path) -> Iterator[tuple[int, list[bytes]]]:
    for directory in proc.iterdir():
        if not directory.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield int(directory.name), (directory / "cmdline").read_bytes().split(b"\0")


def _name(argv: list[bytes]) -> bytes:
    return argv[0].rsplit(b"/", 1)[-1]


def _stop_processes(checkout: Checkout) -> None:
    records = process.recorded(checkout.records)
    keepers = [record for record in records if record.name.startswith(_KEEPERS)]
    # The kubelet first: it would start again what ends below.
    process.stop([record for record in records if record not in keepers], grace_seconds=0)
    process.stop(keepers, grace_seconds=5)
    process.kill_all(lambda: shims(checkout) | tools(checkout) | _in_pods(checkout))


def _in_pods(checkout: Checkout) -> set[int]:
    return {pid for each in _nodes(checkout) for pid in cgroups.processes(each.cgroup)}


def _nodes(checkout: Checkout) -> list[Checkout]:
    """The checkout as each node that it may have had."""
    return [checkout.of_node(number) for number in range(1, MAX_NODES + 1)]


def _remove_shim_sockets(checkout: Checkout) -> None:
    # containerd puts them beside everybody's; each shim leaves its address in its bundle.
    for address in (checkout.run / "containerd").glob("io.containerd.runtime.v2.task/*/*/address"):
        Path(address.read_text().strip().removeprefix("unix://")).unlink(missing_ok=True)


def _remove_traces(checkout: Checkout) -> None:
    """What the kubelet and the network plugins leave at fixed places of the host."""
    for result in _CNI_RESULTS.glob("*"):
        # The loopback's results are not named after our network, but they all name the pod's namespace.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # another cluster's pod just ended
            if str(checkout.run).encode() in result.read_bytes():
                result.unlink(missing_ok=True)
    if _CONTAINER_LOG_LINKS.is_dir():
        for link in _CONTAINER_LOG_LINKS.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if link.is_symlink() and link.readlink().is_relative_to(checkout.log):
                    link.unlink(missing_ok=True)


def _release(checkout: Checkout) -> None:
    with host.machine_lock():
        mounts.unmount_below(checkout.run)
        mounts.remove_tree(checkout.run)
        if not any(RUN_ROOT.glob("*/claim.json")):
            host.restore_sysctls()
