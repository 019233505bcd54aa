"""Which clusters this machine has: one claim file per cluster, made before anything else of it and removed
last.

A claim says whose cluster it is and which addresses it took, so that clusters of several checkouts do not
collide and the remains of a dead one are found whatever killed it.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Network
from pathlib import Path

from e2e.cluster import host, network, process
from e2e.cluster.errors import ClusterError, NotUpError
from e2e.cluster.layout import RUN_ROOT, Addresses, Checkout, Cluster, choose_block


def claim(checkout: Checkout, nodes: int = 1) -> Cluster:
    """Takes free addresses for this checkout's cluster of so many nodes and writes that down."""
    with host.machine_lock():
        host.save_sysctls()
        others = [cluster.addresses.block for cluster in claimed() if cluster.checkout != checkout]
        block = choose_block(checkout.id, (*network.routed_networks(), *others))
        checkout.run.mkdir(parents=True, exist_ok=True)
        new = checkout.claim.with_suffix(".new")
        new.write_text(json.dumps({"root": str(checkout.root), "block": str(block), "nodes": nodes}))
        new.rename(checkout.claim)
    return Cluster(checkout, Addresses(block, nodes))


def claimed() -> list[Cluster]:
    """Every cluster that was claimed and not released, alive or not."""
    return [_read(path) for path in sorted(RUN_ROOT.glob("*/claim.json"))]


def current(root: Path) -> Cluster:
    """The cluster of the checkout at `root`, which must be up."""
    checkout = Checkout.at(root)
    if not checkout.claim.exists() or not checkout.kubeconfig.exists():
        raise _not_up(checkout)
    return _read(checkout.claim)


def num_nodes(checkout: Checkout) -> int:
    """How many nodes the checkout's cluster was claimed with; one where it was not."""
    return _read(checkout.claim).addresses.nodes if checkout.claim.exists() else 1


def with_registry(checkout: Checkout) -> Cluster:
    """The cluster of the checkout, whose registry runs, while the rest may still be starting."""
    records = process.recorded(checkout.records)
    is_there = any(record.name == "registry" and process.is_alive(record) for record in records)
    if not checkout.claim.exists() or not is_there:
        raise _not_up(checkout)
    return _read(checkout.claim)


def is_dead(checkout: Checkout) -> bool:
    """Whether the cluster is of no use: its checkout was deleted, or none of its programs runs."""
    if not checkout.config.is_dir():
        return True
    return not any(process.is_alive(record) for record in process.recorded(checkout.records))


@contextmanager
def lock(checkout: Checkout, *, wait: bool = True) -> Iterator[bool]:
    """One `up` or `down` per checkout at a time; yields whether the lock was had."""
    checkout.state.mkdir(parents=True, exist_ok=True)
    with checkout.lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _not_up(checkout: Checkout) -> NotUpError:
    return NotUpError(f"{checkout.root} has no cluster: run `make up`, or give KUBECONFIG")


def _read(path: Path) -> Cluster:
    try:
        said = json.loads(path.read_text())
        addresses = Addresses(IPv4Network(said["block"]), int(said.get("nodes", 1)))
        return Cluster(Checkout.at(Path(said["root"])), addresses)
    except (ValueError, KeyError) as error:
        raise ClusterError(f"{path} is damaged ({error}): remove it") from error
