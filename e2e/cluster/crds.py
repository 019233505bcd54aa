"""CRDs of other projects, from their Go modules: what the API server makes of our objects of these kinds.

For tests. The operators behind them do not run there, except for KEDA in `make keda`. KEDA's CRD is of the
oldest release that Quire supports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from e2e.cluster import modules


@dataclass(frozen=True)
class Module:
    """The path of a CRD in a module, and its sha256."""

    module: str
    path: str
    sha256: str


SCALED_OBJECT = Module(
    "github.com/kedacore/keda/v2@v2.17.3",
    "config/crd/bases/keda.sh_scaledobjects.yaml",
    "e0975e421cc9ff171ffd374057afd1507d9355cf6de590844a843ab4ae664416",
)
HTTP_ROUTE = Module(
    "sigs.k8s.io/gateway-api@v1.3.0",
    "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
    "a4ecf600c7e0bfd3cdb24e6411938d9b330117a26675f303cc6d9a407cb257d1",
)
INFERENCE_POOL = Module(
    "sigs.k8s.io/gateway-api-inference-extension@v1.0.0",
    "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
    "b37cbcbc1cadb0211fec066051ee6f14296ad4712041c5fe9530f2a1a2b97084",
)
ALL = (SCALED_OBJECT, HTTP_ROUTE, INFERENCE_POOL)


def crd(of: Module) -> dict[str, Any]:
    """The CustomResourceDefinition."""
    return modules.crd(of.module, of.path, of.sha256)
