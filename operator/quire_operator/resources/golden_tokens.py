"""The ConfigMap with the golden tokens: what the canary of the first ready replica answered, by fingerprint.

Every pod mounts it as an optional volume and compares its own canary with it. It is no part of the rendered
revision: its content follows from what pods answer, and a change of it must not replace them.
"""

from __future__ import annotations

from quire_operator import names
from quire_operator.resources.manifest import Manifest, metadata
from quire_operator.spec import LLMDeployment


def build(model: LLMDeployment, content: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(model, names.golden_tokens(model.name)),
        "data": {names.GOLDEN_TOKENS_FILE: content},
    }
