"""Every reason has its place in docs/troubleshooting.md. That a test provokes each on a real API server is
counted while the tests run (e2e.failure_paths).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.api import specs
from quire_operator.status.reasons import REASONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CONDITIONS = {"Degraded", "Stalled", "Scheduled", "FitsAccelerator", "ScalingActive", "ActivatorReady"} | {
    "AdaptersReady",
    "ContextReduced",
    "DrainFitsNotice",
    "TransferDegraded",
    "Routed",
    "RanksAuthenticated",
    "TransfersAuthenticated",
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_has_its_remedy_on_the_page(reason: str) -> None:
    section = PAGE.partition(f"\n## {reason}\n")[2].partition("\n## ")[0]
    assert REASONS[reason].remedy[1:].rstrip(".") in section
    assert f"Event `{reason}`" in section


def test_what_shows_a_reason_is_a_condition_that_exists() -> None:
    shown = {each.partition("=")[0] for reason in REASONS.values() for each in reason.shown.split(", ")}
    assert shown - {""} == CONDITIONS
    assert specs.SCHEMA["properties"]["status"]["properties"]["conditions"]["maxItems"] > len(CONDITIONS)
