"""Every reason has its place in docs/troubleshooting.md, and a test that provokes it on a real API server."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from e2e.api import specs
from quire_operator.status.reasons import REASONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CONDITIONS = {"Degraded", "Stalled", "Scheduled", "FitsAccelerator", "ScalingActive", "ActivatorReady"} | {
    "ContextReduced",
    "DrainFitsNotice",
}


def constants() -> set[str]:
    """Every text that stands in a test of the operator's process."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "e2e/operator").glob("test_*.py")
    ]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {node.value for node in nodes if isinstance(node.value, str)}


PROVOKED = constants()


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_is_provoked_and_has_its_remedy_on_the_page(reason: str) -> None:
    assert reason in PROVOKED, f"no test in e2e/operator provokes {reason}"
    section = PAGE.partition(f"\n## {reason}\n")[2].partition("\n## ")[0]
    assert REASONS[reason].remedy[1:].rstrip(".") in section
    assert f"Event `{reason}`" in section


def test_what_shows_a_reason_is_a_condition_that_exists() -> None:
    shown = {each.partition("=")[0] for reason in REASONS.values() for each in reason.shown.split(", ")}
    assert shown - {""} == CONDITIONS
    assert specs.SCHEMA["properties"]["status"]["properties"]["conditions"]["maxItems"] > len(CONDITIONS)
