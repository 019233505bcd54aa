"""The node's own network namespace and the veth that joins it to the host, and those of a second node.

`lifecycle` makes them, `teardown` removes them. The host gets one interface and one route and nothing else:
forwarding and iptables rules live inside the namespace. Addresses are decided in `layout`.
"""

import json
import os
import subprocess
from ipaddress import IPv4Network
from pathlib import Path

from e2e.cluster.errors import HostError
from e2e.cluster.layout import Cluster

_IN_NAMESPACE = {
    "net/ipv4/ip_forward": "1",
    # Pods of one bridge reach each other through Services only if the bridge shows its traffic to iptables.
    "net/bridge/bridge-nf-call-iptables": "1",
}


def parse_routes(text: str) -> list[IPv4Network]:
    """The destinations of `ip -json route`."""
    destinations = [route["dst"] for route in json.loads(text or "[]")]
    return [IPv4Network(destination) for destination in destinations if destination != "default"]


def routed_networks() -> list[IPv4Network]:
    """Everything that the host routes somewhere already."""
    return parse_routes(_run(["ip", "-json", "-4", "route", "show", "table", "all"]))


def create(cluster: Cluster) -> None:
    """Makes the namespace, the veth and the route."""
    addresses, veth = cluster.addresses, cluster.checkout.veth
    netns = str(cluster.netns)
    cluster.netns.touch()
    # A namespace held by a mount of our own, not by `ip netns`: it is found and removed with everything else
    # of ours.
    _run(["unshare", f"--net={netns}", "true"])
    _run(["ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", netns])
    _run(["ip", "address", "add", f"{addresses.host_ip}/{addresses.link.prefixlen}", "dev", veth])
    _run(["ip", "link", "set", veth, "up"])
    inside = [
        ["ip", "link", "set", "lo", "up"],
        ["ip", "address", "add", f"{addresses.node_ip}/{addresses.link.prefixlen}", "dev", "eth0"],
        ["ip", "link", "set", "eth0", "up"],
        # The node's own programs call Services too. There is no default route, so that the kernel needs one
        # before iptables turns the address into a pod's.
        ["ip", "route", "add", str(addresses.services), "dev", "eth0", "src", str(addresses.node_ip)],
    ]
    for command in inside:
        _run(cluster.in_netns(command))
    _set_in_namespace(cluster)
    _run(["ip", "route", "add", str(addresses.block), "via", str(addresses.node_ip), "dev", veth])


def join(first: Cluster, other: Cluster) -> None:
    """Makes the namespace of a further node, and the wire to the first node, which routes for it."""
    netns, ours, theirs = str(other.netns), first.addresses, other.addresses
    other.netns.touch()
    _run(["unshare", f"--net={netns}", "true"])
    wire = f"wire-{other.checkout.node}"
    _run(first.in_netns(["ip", "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", netns]))
    on_first = [
        ["ip", "address", "add", f"{ours.wire_ip}/{ours.wire.prefixlen}", "dev", wire],
        ["ip", "link", "set", wire, "up"],
        ["ip", "route", "add", str(theirs.pods), "via", str(theirs.wire_ip), "dev", wire],
    ]
    on_other = [
        ["ip", "link", "set", "lo", "up"],
        ["ip", "address", "add", f"{theirs.wire_ip}/{theirs.wire.prefixlen}", "dev", "eth0"],
    ]
    for node, commands in ((first, on_first), (other, on_other)):
        for command in commands:
            _run(node.in_netns(command))
    mend_wire(other)
    _set_in_namespace(other)


def cut_wire(other: Cluster) -> None:
    """Cuts a further node off from all that is not on it."""
    _run(other.in_netns(["ip", "link", "set", "eth0", "down"]))


def mend_wire(other: Cluster) -> None:
    """Undoes it."""
    gateway = str(other.addresses.of_node(1).wire_ip)
    _run(other.in_netns(["ip", "link", "set", "eth0", "up"]))
    # The kernel has removed it with the link.
    _run(other.in_netns(["ip", "route", "replace", "default", "via", gateway, "dev", "eth0"]))


def _set_in_namespace(cluster: Cluster) -> None:
    for name, value in _IN_NAMESPACE.items():
        path = Path("/proc/sys") / name
        _run(cluster.in_netns(["sh", "-c", f"[ ! -e {path} ] || echo {value} >{path}"]))


def remove_veth(veth: str) -> None:
    """Removes the interface (and with it its peer and the routes), if it is there."""
    try:
        _run(["ip", "link", "delete", veth])
    except HostError:
        # The kernel may be faster: it takes the interface away when the namespace's last process is gone.
        if has_interface(veth):
            raise


def has_interface(name: str) -> bool:
    """Whether the host has this interface."""
    return (Path("/sys/class/net") / name).exists()


def is_namespace(path: Path) -> bool:
    """Whether a namespace is mounted here."""
    return path.exists() and os.stat(path).st_dev != os.stat(path.parent).st_dev


def _run(argv: list[str]) -> str:
    run = subprocess.run(argv, capture_output=True, text=True)
    if run.returncode != 0:
        raise HostError(f"{' '.join(argv)}: {run.stderr.strip()}")
    return run.stdout
