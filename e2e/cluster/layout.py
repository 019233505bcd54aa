"""Where a checkout's cluster keeps its things, and which addresses it has: names and paths only, nothing is
touched.

Every other module of this package asks here. Two places: `.cluster/` in the checkout holds what is worth
keeping (programs, the image store, the registry) and what is big; `/run/quire-cluster/<id>/` holds what dies
with the cluster (sockets, process records, mounts), so that it is found even after the checkout was deleted
and socket paths stay short.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from e2e.cluster.errors import HostError

RUN_ROOT = Path("/run/quire-cluster")
MAX_NODES = 2
API_PORT = 6443
REGISTRY = "localhost:5000"

# Each cluster takes one /20 of this block: 512 of them.
ADDRESSES = IPv4Network("10.192.0.0/11")
_BLOCK_PREFIX = 20


@dataclass(frozen=True)
class Checkout:
    """One working tree's cluster, up or not: its identity and its paths. `node`: whose own files are meant,
    where a node has some; a second node's lie in a directory below those of the first.
    """

    root: Path
    id: str
    node: int = 1

    @classmethod
    def at(cls, root: Path) -> "Checkout":
        root = root.resolve()
        return cls(root, hashlib.sha256(str(root).encode()).hexdigest()[:8])

    def of_node(self, number: int) -> "Checkout":
        """The same, with the files of another node."""
        return replace(self, node=number)

    @property
    def state(self) -> Path:
        return self.root / ".cluster"

    @property
    def own(self) -> Path:
        """What the node has for itself and the others do not."""
        return self.state if self.node == 1 else self.state / f"node-{self.node}"

    @property
    def bin(self) -> Path:
        return self.state / "bin"

    @property
    def log(self) -> Path:
        return self.state / "log"

    @property
    def audit_log(self) -> Path:
        return self.log / "audit.log"

    @property
    def lock(self) -> Path:
        return self.state / "lock"

    @property
    def pod_logs(self) -> Path:
        return self.log / ("pods" if self.node == 1 else f"pods-{self.node}")

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def config(self) -> Path:
        return self.own / "config"

    @property
    def pod_files(self) -> Path:
        """The kubelet's directory as it lies on the disk."""
        return self.own / "kubelet"

    @property
    def kubelet(self) -> Path:
        """The same, mounted where the paths of its unix sockets are short however deep the checkout lies."""
        return self.run / "kubelet"

    @property
    def etcd(self) -> Path:
        return self.state / "etcd"

    @property
    def containerd(self) -> Path:
        return self.own / "containerd"

    @property
    def registry(self) -> Path:
        return self.state / "registry"

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def disposable(self) -> tuple[Path, ...]:
        """What `down` deletes: everything that belongs to one life of the cluster (logs stay to be read)."""
        nodes = [self.of_node(number) for number in range(1, MAX_NODES + 1)]
        own = [path for node in nodes for path in (node.pod_files, node.config)]
        return (self.kubeconfig, self.etcd, self.pki, *own, self.state / "run")

    @property
    def run(self) -> Path:
        return RUN_ROOT / self.id / ("" if self.node == 1 else f"node-{self.node}")

    @property
    def claim(self) -> Path:
        return RUN_ROOT / self.id / "claim.json"

    @property
    def records(self) -> Path:
        return RUN_ROOT / self.id / "processes"

    @property
    def netns(self) -> Path:
        return self.run / "netns"

    @property
    def socket(self) -> Path:
        return self.run / "containerd.sock"

    @property
    def veth(self) -> str:
        return f"quire-{self.id}"  # 14 of the 15 bytes that an interface's name may have

    @property
    def cgroup(self) -> str:
        return f"quire-{self.id}" + ("" if self.node == 1 else f"-{self.node}")

    @property
    def cni_network(self) -> str:
        return f"quire-{self.id}" + ("" if self.node == 1 else f"-{self.node}")


@dataclass(frozen=True)
class Addresses:
    """One cluster's /20: a link to the host, the pods, the Services, the wire between two nodes; as one of
    its `nodes` has them.
    """

    block: IPv4Network
    nodes: int = 1
    node: int = 1

    @property
    def link(self) -> IPv4Network:
        return self._quarter(0)

    @property
    def host_ip(self) -> IPv4Address:
        return self.link[1]

    @property
    def node_ip(self) -> IPv4Address:
        return self.link[2] if self.node == 1 else self.wire_ip

    @property
    def wire(self) -> IPv4Network:
        """Between the nodes. The first one routes for the others."""
        return self._quarter(3)

    @property
    def wire_ip(self) -> IPv4Address:
        """This node's end of it."""
        return self.wire[self.node]

    @property
    def pods(self) -> IPv4Network:
        """The addresses of this node's pods."""
        return list(self.all_pods.subnets(prefixlen_diff=self.nodes - 1))[self.node - 1]

    @property
    def all_pods(self) -> IPv4Network:
        return self._quarter(1)

    def of_node(self, number: int) -> "Addresses":
        """The same, as another node has them."""
        return replace(self, node=number)

    @property
    def services(self) -> IPv4Network:
        return self._quarter(2)

    @property
    def api_service_ip(self) -> IPv4Address:
        return self.services[1]

    @property
    def dns_ip(self) -> IPv4Address:
        return self.services[10]

    def _quarter(self, index: int) -> IPv4Network:
        return list(self.block.subnets(prefixlen_diff=2))[index]


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up: what tests and image builders need to know of it."""

    checkout: Checkout
    addresses: Addresses

    @property
    def name(self) -> str:
        """The node's."""
        return f"node-{self.checkout.node}"

    @property
    def others(self) -> "tuple[Cluster, ...]":
        """The cluster as each further node has it."""
        return tuple(self.of_node(number) for number in range(2, self.addresses.nodes + 1))

    def of_node(self, number: int) -> "Cluster":
        """The cluster as another node has it."""
        return Cluster(self.checkout.of_node(number), self.addresses.of_node(number))

    @property
    def root(self) -> Path:
        return self.checkout.root

    @property
    def kubeconfig(self) -> Path:
        return self.checkout.kubeconfig

    @property
    def netns(self) -> Path:
        return self.checkout.netns

    @property
    def node_ip(self) -> str:
        return str(self.addresses.node_ip)

    @property
    def registry(self) -> str:
        return REGISTRY

    @property
    def url(self) -> str:
        return f"https://{self.addresses.of_node(1).node_ip}:{API_PORT}"

    def in_netns(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` inside the node's network (its registry, its loopback)."""
        # Not `ip netns exec`: that mounts its own /sys and hides the cgroups.
        return ["nsenter", f"--net={self.netns}", "--", *argv]


def choose_block(checkout_id: str, taken: Iterable[IPv4Network]) -> IPv4Network:
    """The checkout's own block, or the next one that overlaps nothing that the host already routes."""
    blocks = list(ADDRESSES.subnets(new_prefix=_BLOCK_PREFIX))
    first = int(checkout_id, 16) % len(blocks)
    occupied = tuple(taken)
    for block in (*blocks[first:], *blocks[:first]):
        if not _overlaps(block, occupied):
            return block
    raise HostError(
        f"every /{_BLOCK_PREFIX} of {ADDRESSES} is routed already: remove routes or stop clusters"
    )


def _overlaps(block: IPv4Network, occupied: Collection[IPv4Network]) -> bool:
    # A default route overlaps everything and says nothing.
    return any(block.overlaps(other) for other in occupied if other.prefixlen > 0)


def foreign_kubeconfig(checkout: Checkout, environ: Mapping[str, str]) -> str | None:
    """The user's own cluster, when KUBECONFIG names one that is not this checkout's."""
    given = environ.get("KUBECONFIG", "")
    if not given or Path(given).resolve() == checkout.kubeconfig.resolve():
        return None
    return given
