"""Which images stay on the node: those that pods use, for every edit of the code leaves one behind.

For the end of `make up`, when the newest image serves. The registry keeps all of them, so that a rollback can
pull an older one again.
"""

import subprocess
from collections.abc import Collection

from e2e.cluster import node, process
from e2e.cluster.layout import Cluster


def remove_unused(cluster: Cluster, used: Collection[str]) -> None:
    """Removes the images that came from the node's registry and are not among `used`."""
    listed = _ctr(cluster, "images", "list")
    if names := unused(listed, cluster.registry, used):
        _ctr(cluster, "images", "remove", *names)


def unused(listed: str, registry: str, used: Collection[str]) -> list[str]:
    """The names of unused images of `registry` in the output of `ctr images list` (pure).

    The kubelet's interface keeps three names for an image, by tag, by digest and by the hash of its
    configuration: all three have to go.
    """
    digests = {columns[0]: columns[2] for columns in (line.split() for line in listed.splitlines()[1:])}
    kept = {digest for name, digest in digests.items() if name in used}
    ours = {digest for name, digest in digests.items() if name.startswith(f"{registry}/")}
    return sorted(name for name, digest in digests.items() if digest in ours - kept)


def _ctr(cluster: Cluster, *arguments: str) -> str:
    argv = node.ctr(cluster, *arguments)
    environment = {"PATH": process.PROGRAM_PATH}
    return subprocess.run(argv, capture_output=True, text=True, check=True, env=environment).stdout
