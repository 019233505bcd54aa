"""The children of some LLMDeployments as YAML, to be read: a change of what pods run shows in a review.

Write them anew with: UPDATE_GOLDEN=1 pytest tests/operator/resources/test_golden.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e import yaml_files
from e2e.api import profiles, specs
from quire_operator import resources, spec
from quire_operator.__main__ import dump
from quire_operator.settings import Settings

GOLDEN = Path(__file__).parents[1] / "golden"
SETTINGS = Settings(engine_image="registry.example/quire-server:1", credential_hosts=("*.example.com",))
EXAMPLE = yaml_files.load((specs.ROOT / "examples" / "smollm2.yaml").read_text(encoding="utf-8"))
BODIES = {
    "minimal": specs.minimal(),
    "full": specs.FULL,
    "autoscaled": specs.AUTOSCALED,
    "idling": specs.IDLING,
    "sharded": specs.SHARDED,
    "sharing": specs.SHARING,
    "adapted": specs.ADAPTED,
    "embedding": specs.EMBEDDING,
    "grouped": specs.GROUPED,
    "grouped-gpus": specs.GROUPED_ON_GPUS,
    "sharded-gpus": specs.minimal(
        resources={"cpu": "4", "profileRef": {"name": "h100"}}, parallelism={"tensor": 2, "pipeline": 2}
    ),
    **{specs.name_of(body): body for body in specs.DISAGGREGATED},
    "from-a-hub": specs.DOWNLOADED[0],
    "shared": specs.DOWNLOADED[4],
    "smollm2": specs.merged(EXAMPLE, {"metadata": {"uid": "11111111-2222-3333-4444-555555555555"}}),
}


@pytest.mark.parametrize("name", BODIES)
def test_children_match_the_golden_files(name: str) -> None:
    children = resources.build(spec.parse(BODIES[name]), SETTINGS, **profiles.named_by(BODIES[name]))
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(dump(children), encoding="utf-8")
    assert list(yaml_files.load_all(path.read_text(encoding="utf-8"))) == list(children)
