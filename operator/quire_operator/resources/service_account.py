"""The ServiceAccount of the serving pods: an identity without rights and without a token."""

from __future__ import annotations

from quire_operator.resources.manifest import Manifest, metadata
from quire_operator.spec import LLMDeployment


def build(model: LLMDeployment) -> Manifest:
    """The generated ServiceAccount; there is none where the user names one."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(model, model.name),
        "automountServiceAccountToken": False,
    }
