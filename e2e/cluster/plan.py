"""What `up` will change on this machine, said before it does.

`observe` looks, `describe` (pure) says it in words; `lifecycle` prints that and goes on.
"""

from dataclasses import dataclass, replace

from e2e.cluster import claims, host, network, programs
from e2e.cluster.layout import Addresses, Checkout, choose_block


@dataclass(frozen=True)
class Facts:
    """What was found on the machine."""

    missing_packages: tuple[str, ...]
    unbuilt_programs: tuple[str, ...]
    addresses: Addresses
    sysctls: dict[str, str]
    needs_bridge_module: bool


def observe(checkout: Checkout, nodes: int | None = None) -> Facts:
    """Looks at the machine and changes nothing. `nodes`: as `lifecycle.up` has it."""
    wanted = claims.num_nodes(checkout) if nodes is None else nodes
    claimed = {cluster.checkout: cluster.addresses for cluster in claims.claimed()}
    addresses = claimed.get(checkout)
    if addresses is None:
        others = [other.block for other in claimed.values()]
        routed = network.routed_networks() if "iproute2" not in host.missing_packages() else []
        addresses = Addresses(choose_block(checkout.id, (*routed, *others)))
    needed = {*programs.OF_UP, *programs.of_cluster(wanted)}
    return Facts(
        missing_packages=tuple(host.missing_packages()),
        unbuilt_programs=tuple(n for n in programs.unbuilt(checkout.bin) if n in needed),
        addresses=replace(addresses, nodes=wanted),
        sysctls=host.sysctls(),
        needs_bridge_module=host.needs_bridge_module(),
    )


def describe(checkout: Checkout, facts: Facts) -> str:
    """The plan as text."""
    addresses = facts.addresses
    nodes = [checkout.of_node(number) for number in range(1, addresses.nodes + 1)]
    namespaces = "a namespace" if len(nodes) == 1 else f"{len(nodes)} namespaces"
    changed = [
        f"{name.replace('/', '.')} {facts.sysctls[name]} -> {value}"
        for name, value in host.KUBELET_SYSCTLS.items()
        if name in facts.sysctls and facts.sysctls[name] != value
    ]
    packages = f"apt-get install {' '.join(facts.missing_packages)} (they stay, and so do their services)"
    built = f"{' '.join(facts.unbuilt_programs)}, built from Go modules"
    wire = f"the veth {checkout.veth} with {addresses.host_ip}, the route {addresses.block}"
    lines = [
        f"The cluster of {checkout.root} changes this on the host:",
        f"  packages   {packages if facts.missing_packages else 'none, all are installed'}",
        f"  programs   {built if facts.unbuilt_programs else 'none, all are built'} (.cluster/bin)",
        f"  network    {namespaces}, {wire};",
        "             ip_forward, bridge and iptables rules exist inside the namespace only",
        f"  cgroups    {', '.join(f'/{node.cgroup}' for node in nodes)}",
        f"  sysctls    {', '.join(changed) + ' (by the kubelet)' if changed else 'none'}",
        f"  files      {checkout.state}, .venv and .cache beside it, {checkout.run},",
        "             links in /var/log/containers",
    ]
    if facts.needs_bridge_module:
        lines.append("  modules    br_netfilter (stays loaded)")
    lines.append("`make down` undoes it; .cluster keeps the programs, the images and the logs.")
    lines.append(
        "The newest images stay in buildah's own store, too (`buildah rmi --all` empties that), and every"
    )
    lines.append(f"pushed one in {checkout.registry}, which may be removed after `make down`.")
    return "\n".join(lines)
