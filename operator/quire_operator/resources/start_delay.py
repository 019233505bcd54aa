"""The ConfigMap with the time for which groups of pods wait before they load. It is no part of the rendered
revision: it follows from how often they were recreated, and a change of it must not replace them.
"""

from __future__ import annotations

from quire_operator import names
from quire_operator.resources.manifest import Manifest, metadata
from quire_operator.spec import LLMDeployment


def build(model: LLMDeployment, seconds: int) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(model, names.start_delay(model.name)),
        "data": {names.START_DELAY_KEY: str(seconds)},
    }
