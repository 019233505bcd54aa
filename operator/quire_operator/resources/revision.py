"""The ControllerRevision: what was rendered for a spec, kept for as long as that spec may serve again."""

from __future__ import annotations

from quire_operator import names
from quire_operator.resources.kept import Kept
from quire_operator.resources.manifest import Manifest, metadata
from quire_operator.spec import LLMDeployment


def build(model: LLMDeployment, render: Kept, *, number: int, rollback_to: str) -> Manifest:
    """`number`: the highest is the one in use. `rollback_to`: name of the last one that was Ready, if any."""
    annotations = {"annotations": {names.ANNOTATION_ROLLBACK_TO: rollback_to}} if rollback_to else {}
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {**metadata(model, render.name), **annotations},
        "revision": number,
        "data": render.data,
    }
