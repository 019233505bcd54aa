"""The ServiceAccount of the serving pods: an identity without rights and without a token."""

from __future__ import annotations

from quire_operator.resources.manifest import Manifest, metadata
from quire_operator.spec import LLMDeployment


def build(model: LLMDeployment) -> Manifest:
    """Ours; not called where the user brings one."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(model, model.name),
        "automountServiceAccountToken": False,
    }
