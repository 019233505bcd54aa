"""The children of an LLMDeployment as plain manifests, and the revision that keeps them until the spec
changes.
"""

from quire_operator.resources.children import build
from quire_operator.resources.manifest import Manifest
from quire_operator.resources.references import Reference
from quire_operator.resources.references import restricted as restricted_references
from quire_operator.resources.rendered_revision import (
    REVISIONED_KINDS,
    RenderedRevision,
    controller_revision,
    parse_stored,
    render_revision,
    renders_same_pods,
    with_revision,
)
from quire_operator.resources.scaling_behavior import PodMeasurements

__all__ = [
    "REVISIONED_KINDS",
    "Manifest",
    "PodMeasurements",
    "Reference",
    "RenderedRevision",
    "build",
    "controller_revision",
    "parse_stored",
    "render_revision",
    "renders_same_pods",
    "restricted_references",
    "with_revision",
]
