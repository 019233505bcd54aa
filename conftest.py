"""Holds for every test of the repository: with CI=true a test that cannot run is a failure, not a skip, and
in `make test` the failure paths that run are recorded (e2e.failure_paths).
"""

import gc
import os
from collections.abc import Generator
from typing import TypeVar

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from e2e.failure_paths import import_hook

# Until `pytest_collection_finish`: what is imported and collected stays, and walking it takes seconds.
gc.disable()

# Before any module of the product is imported.
import_hook.install()
os.environ |= import_hook.environment(os.environ.get("PYTHONPATH", ""))

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

# Folders whose tests share an API server, which costs ten seconds of CPU: too much for each worker.
_TOGETHER = ("e2e/api", "e2e/metrics_adapter", "tests/chart")

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


class _LoadFolderOrFile(LoadFileScheduling):
    """Gives a worker all tests of a file, or of a folder of `_TOGETHER`."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        folder = os.path.dirname(file)
        return folder if folder in _TOGETHER else file


@pytest.hookimpl(tryfirst=True, optionalhook=True)  # before that of xdist, where it is loaded
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """That of `--dist loadfile`; None leaves the choice to xdist."""
    return _LoadFolderOrFile(config, log) if config.getoption("dist") == "loadfile" else None
