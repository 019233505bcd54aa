"""A pytest plugin (`-p e2e.chaos.table`) that prints the table of faults: `make chaos`.

A row comes from a test's mark `chaos`: the number and fault of the matrix in docs/survival.md, and what
proves that the fault took effect. A test reports measurements with `record_property("measured", ...)`.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "survival.md"
HEAD = "| row | fault | proven by | result | measured | seconds |\n|---:|---|---|---|---|---:|\n"


class Table:
    """Collects reports, also of xdist's workers, and prints them at the end."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str, str], list[tuple[bool, str, float]]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reported: dict[str, Any] = dict(report.user_properties)
        if "row" in reported and (report.when == "call" or report.failed):
            key = int(reported["row"]), str(reported["fault"]), str(reported["proof"])
            self._rows[key].append((report.passed, str(reported.get("measured", "")), report.duration))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._rows:
            return
        table = HEAD + "".join(_line(*key, runs) for key, runs in sorted(self._rows.items()))
        terminalreporter.write_line("")
        terminalreporter.write(table)
        RESULTS.write_text(_page(table), encoding="utf-8")


def _line(row: int, fault: str, proof: str, runs: list[tuple[bool, str, float]]) -> str:
    failed = sum(not passed for passed, _, _ in runs)
    times = f" ({len(runs)} times)" if len(runs) > 1 else ""
    result = f"{failed} of {len(runs)} FAILED" if failed else f"survived{times}"
    measured = "; ".join(dict.fromkeys(text for _, text, _ in runs if text))
    return f"| {row} | {fault} | {proof} | {result} | {measured} | {sum(run[2] for run in runs):.0f} |\n"


def _page(table: str) -> str:
    machine = f"{os.cpu_count()} CPUs, Python {platform.python_version()}"
    minutes = f"CHAOS_MINUTES={os.environ['CHAOS_MINUTES']} " if "CHAOS_MINUTES" in os.environ else ""
    return (
        "# What the operator survives\n\n"
        "Each row ends with the children of an undisturbed run, none of them twice, and no pod\n"
        "replaced; what the rows mean: [docs/survival.md](../../docs/survival.md).\n\n"
        f"{table}\n{machine}. Command: `{minutes}make chaos`.\n"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Table())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("chaos")
        if mark is not None:
            item.user_properties += [("row", mark.args[0]), *sorted(mark.kwargs.items())]
