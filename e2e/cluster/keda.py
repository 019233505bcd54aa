"""KEDA's CRD of ScaledObjects, from the Go module of the oldest release that Quire takes.

KEDA itself does not run in the tests: its operator is 3,300 Go packages, the clients of every cloud among
them, and was not built after 15 minutes on two cores.
"""

from __future__ import annotations

from typing import Any

from e2e.cluster import modules

MODULE = "github.com/kedacore/keda/v2@v2.17.3"
SHA256 = "e0975e421cc9ff171ffd374057afd1507d9355cf6de590844a843ab4ae664416"


def crd() -> dict[str, Any]:
    """The CRD of scaledobjects.keda.sh."""
    return modules.crd(MODULE, "config/crd/bases/keda.sh_scaledobjects.yaml", SHA256)
