"""Where images go: the registry in the node's network, or the one that QUIRE_REGISTRY names.

The only module here that knows of `e2e.cluster`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e import cluster
from e2e.images.errors import ImageError


@dataclass(frozen=True)
class Target:
    """A registry, and the command prefix with which it is reached."""

    registry: str
    within: tuple[str, ...] = ()

    @classmethod
    def of(cls, root: Path, environ: Mapping[str, str]) -> "Target":
        """The target for the cluster in use."""
        registry = environ.get("QUIRE_REGISTRY")
        if registry:
            return cls(registry.rstrip("/"))
        checkout = cluster.Checkout.at(root)
        if cluster.foreign_kubeconfig(checkout, environ) is not None:
            raise ImageError(
                "KUBECONFIG names a cluster of yours: set QUIRE_REGISTRY to a registry that it pulls from "
                "and that you may push to, such as registry.example.com/team"
            )
        ours = cluster.with_registry(checkout)
        return cls(ours.registry, tuple(ours.in_netns([])))
