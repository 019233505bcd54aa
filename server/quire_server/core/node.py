"""Which ranks of a model run on which node: equally many on each, in their order."""

from __future__ import annotations


def ranks_of_node(ranks: int, nodes: int, node: int) -> range:
    """The ranks of this node. ``nodes`` divides ``ranks``."""
    each = ranks // nodes
    return range(node * each, (node + 1) * each)
