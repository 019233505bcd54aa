"""What `make up` is going to take, said before it begins: time, downloads, disk.

`missing` looks at the machine, `describe` (pure) adds up. The numbers are rounded measurements on 2 cores.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from e2e.cluster import Checkout, programs
from e2e.images import base, tools
from e2e.images.errors import ImageError
from e2e.up.artifacts import is_complete
from e2e.up.place import MODEL


@dataclass(frozen=True)
class Cost:
    """Of one thing that is not there yet."""

    name: str
    cpu_seconds: int
    download_mb: int
    disk_mb: int


COSTS = (
    Cost("kube", cpu_seconds=540, download_mb=250, disk_mb=3400),
    Cost("coredns", cpu_seconds=15, download_mb=20, disk_mb=200),
    Cost("helm", cpu_seconds=25, download_mb=30, disk_mb=200),
    Cost("images", cpu_seconds=320, download_mb=3100, disk_mb=14_700),
    Cost("model", cpu_seconds=15, download_mb=100, disk_mb=400),
)
# Cluster, operator, the node's pull of a new image and the model's load, when everything else is there.
_ALWAYS_SECONDS = 60


def missing(checkout: Checkout, environ: Mapping[str, str], *, is_ours: bool) -> frozenset[str]:
    """Names of what has to be made first."""
    names = set(programs.unbuilt(checkout.bin))
    if not is_ours:
        names &= {"kube", "helm"}
    if not _has_base(checkout, environ):
        names.add("images")
    if not is_complete(checkout.root / MODEL):
        names.add("model")
    return frozenset(names)


def _has_base(checkout: Checkout, environ: Mapping[str, str]) -> bool:
    """Whether images were built here before, so that their heavy layers are there."""
    try:
        tool = tools.choose()
        return tool.has(base.reference(tool, checkout.root, environ))
    except ImageError:
        return False  # neither buildah nor docker yet, or no base


def describe(names: Collection[str], *, cores: int = 2) -> str:
    """One line, or two on a machine that lacks something."""
    costs = [cost for cost in COSTS if cost.name in names]
    minutes = -(-(sum(cost.cpu_seconds for cost in costs) // cores + _ALWAYS_SECONDS) // 60)
    if not costs:
        return f"It takes about {minutes} min: everything is built already."
    downloads, disk = sum(cost.download_mb for cost in costs), sum(cost.disk_mb for cost in costs)
    return (
        f"It takes about {minutes} min on {cores} cores, {downloads / 1000:.1f} GB of downloads and "
        f"{disk / 1000:.0f} GB of disk.\nTo be made: {', '.join(cost.name for cost in costs)}."
    )
