"""Which cluster is in use, the one of `e2e/cluster` or the one that KUBECONFIG names, and what follows."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e import cluster
from e2e.kubectl import Kubectl
from e2e.up.volume import OnNode, ThroughPod, Volumes

# Where `e2e.models` puts it, too, which imports torch.
MODEL = Path(".cache/models/smollm2")


@dataclass(frozen=True)
class Place:
    """A cluster, and the checkout that works with it."""

    checkout: cluster.Checkout
    kubectl: Kubectl
    is_ours: bool

    @classmethod
    def of(cls, root: Path, environ: Mapping[str, str]) -> "Place":
        """The place that `make up` brings up, or has brought up, from the checkout at `root`."""
        checkout = cluster.Checkout.at(root)
        foreign = cluster.foreign_kubeconfig(checkout, environ)
        kubeconfig = Path(foreign) if foreign else checkout.kubeconfig
        return cls(checkout, Kubectl(checkout.bin, kubeconfig), is_ours=foreign is None)

    @property
    def model(self) -> Path:
        """SmolLM2-135M-Instruct, ready to serve."""
        return self.checkout.root / MODEL

    def volumes(self, image: str) -> Volumes:
        """How models get behind claims here; `image` is the server's."""
        if self.is_ours:
            return OnNode(self.kubectl, self.checkout.state / "models")
        return ThroughPod(self.kubectl, image)
