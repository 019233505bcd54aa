"""A real Kubernetes for this checkout: a node in a network namespace of its own, and a second one where it is
asked for.

`python -m e2e.cluster up` for people, these names for tests and for the image builder.
"""

from e2e.cluster.claims import current, with_registry
from e2e.cluster.images import remove_unused
from e2e.cluster.layout import Checkout, Cluster, foreign_kubeconfig
from e2e.cluster.lifecycle import down, start_registry, up

__all__ = [
    "Checkout",
    "Cluster",
    "current",
    "down",
    "foreign_kubeconfig",
    "remove_unused",
    "start_registry",
    "up",
    "with_registry",
]
