"""Holds for every test of the repository: with CI=true a test that cannot run is a failure, not a skip, and
in `make test` the failure paths that run are recorded (e2e.failure_paths).
"""

import gc
import os
from collections.abc import Generator
from typing import TypeVar

import pytest

from e2e.failure_paths import import_hook

# Until `pytest_collection_finish`: what is imported and collected stays, and walking it takes seconds.
gc.disable()

# Before any module of the product is imported.
import_hook.install()
os.environ |= import_hook.environment(os.environ.get("PYTHONPATH", ""))

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

_IN_CI = os.environ.get("CI") == "true"


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _failed_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _failed_if_skipped((yield))


def _failed_if_skipped(report: Report) -> Report:
    # An expected failure is reported as skipped too, but it did run.
    if _IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI=true forbids: {reason}"
    return report
