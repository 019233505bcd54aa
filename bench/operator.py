"""The cost of the operator with a thousand LLMDeployments: ``python -m bench.operator``, about seven minutes.
``--size 40`` checks that it works and writes no result.

A real API server with an audit log, from which writes are counted and timed, and the operator's process with
the permissions of the chart. Pods and the status of Deployments are written as controllers and kubelets would
write them. Counts and memory are valid on a busy machine, times only on an idle one.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bench.process_cpu import used
from e2e.operator import rights
from e2e.operator.audited import Write, audited, writes
from e2e.operator.fleet import Fleet, megabytes, reconciles, wait_idle
from e2e.operator.process import OperatorProcess
from e2e.operator.world import CHILDREN, OPERATOR_NAMESPACE, World
from e2e.waiting import eventually
from quire_operator.settings import Settings

SIZE = 1000
PROBES = 10  # this many are created, and have a child deleted, at a constant rate
PER_SECOND = 2.0
SETTLE_SECONDS = 12  # resources that wait for pods are reconciled every ten
IDLE_SECONDS = 100
BUSY = 0.1  # CPU seconds per second, above which a re-list is running
RESYNC_SECONDS = 30  # twenty times as often as by default, so that some occur
OPERATOR = f"system:serviceaccount:{OPERATOR_NAMESPACE}:quire-operator"
RESULTS = Path(__file__).parent / "results" / "operator.md"


@dataclass
class Report:
    """The rows of the table."""

    rows: list[tuple[str, str, str, bool]] = field(default_factory=list)

    def add(self, what: str, value: float, bound: float | None, unit: str = "", digits: int = 2) -> None:
        """Add a figure with its upper bound."""
        limit = "" if bound is None else f"<= {bound:g}{unit}"
        holds = bound is None or value <= bound
        self.rows.append((what, f"{value:.{digits}f}{unit}", limit, holds))
        print(f"{what}: {value:.{digits}f}{unit} {limit}{'' if holds else '  MISSED'}", flush=True)

    def table(self) -> str:
        """As Markdown."""
        lines = [
            f"| {what} | {value} | {bound} | {'' if ok else 'missed'} |"
            for what, value, bound, ok in self.rows
        ]
        return "| what | measured | bound | |\n|---|---:|---:|---|\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=SIZE)
    size = parser.parse_args().size
    began, report = time.monotonic(), Report()
    with tempfile.TemporaryDirectory() as name, audited() as (server, world):
        kubeconfig = rights.token_kubeconfig(server, world, "quire-operator", Path(name) / "kubeconfig")
        started: list[OperatorProcess] = []

        def start(replica: str) -> OperatorProcess:
            environ = {"QUIRE_RESYNC_SECONDS": str(RESYNC_SECONDS)}
            started.append(OperatorProcess(replica, kubeconfig, Path(name), **environ).start())
            return started[-1]

        try:
            _measure(Fleet(world, size), start, report)
        finally:
            for process in started:
                process.stop()
    if size == SIZE:
        _write(report, time.monotonic() - began)


def _measure(fleet: Fleet, start: Callable[[str], OperatorProcess], report: Report) -> None:
    world = fleet.world
    operator = start("first").wait_leading(world)
    _populate(fleet, operator, report)
    _repair(fleet, operator, report)
    _idle(world, operator, report)
    report.add(f"memory with {fleet.size} LLMDeployments (RSS)", megabytes(operator.pid), 150, " MB", 0)
    report.add("memory at its highest", megabytes(operator.pid, "VmHWM"), None, " MB", 0)
    _take_over(fleet, operator, start, report)


def _populate(fleet: Fleet, operator: OperatorProcess, report: Report) -> None:
    world, size = fleet.world, fleet.size
    most = size - size // PROBES
    fleet.make_namespaces()
    fleet.each(fleet.make_and_serve, range(most))
    wait_idle(operator)
    _steadily(fleet.make, range(most, size))
    eventually("the last one's Deployment", lambda: world.get("Deployment", *fleet.place(size - 1)))
    time.sleep(SETTLE_SECONDS)
    made = writes(world)
    fleet.each(fleet.serve, range(most, size))
    eventually("all serve", lambda: fleet.serving() == size, seconds=300, poll=1)
    wait_idle(operator)

    for number in range(most, size):
        place = fleet.place(number)
        of_one = Counter(w.resource for w in made if w.user == OPERATOR and _is_of(w, *place))
        children = sum(n for resource, n in of_one.items() if resource != "llmdeployments/status")
        assert children == len(CHILDREN) + 1, (
            f"{place}: one write per child, and its ControllerRevision: {of_one}"
        )
    report.add("writes of children per LLMDeployment before its pods", children, len(CHILDREN) + 1, "", 0)
    statuses = _per_model(writes(world), "llmdeployments/status")
    report.add("writes of the status until it serves, at most", max(statuses.values()), 3, "", 0)
    events = sum(w.resource == "events" for w in writes(world) if w.user == OPERATOR)
    report.add("Events until it serves, on average", events / size, None)
    seconds = [_created_to_children(fleet, number, made) for number in range(most, size)]
    _add_p99(report, f"created to all children, {PER_SECOND:g} a second", seconds, 1)


def _is_of(write: Write, namespace: str, name: str) -> bool:
    """The name of a ConfigMap and of a ControllerRevision is followed by a hash."""
    return write.namespace == namespace and (write.name == name or write.name.startswith(f"{name}-"))


def _per_model(made: Iterable[Write], resource: str) -> Counter[tuple[str, str]]:
    return Counter((w.namespace, w.name) for w in made if w.user == OPERATOR and w.resource == resource)


def _created_to_children(fleet: Fleet, number: int, made: list[Write]) -> float:
    place = fleet.place(number)
    (asked,) = (w.at for w in made if w.user != OPERATOR and w.verb == "create" and _is_of(w, *place))
    applied = [
        w.at
        for w in made
        if w.user == OPERATOR and _is_of(w, *place) and w.resource != "llmdeployments/status"
    ]
    return max(applied) - asked


def _repair(fleet: Fleet, operator: OperatorProcess, report: Report) -> None:
    numbers = range(0, fleet.size, PROBES)
    began = time.time()
    _steadily(lambda number: fleet.world.delete("Service", *fleet.place(number)), numbers)
    wait_idle(operator)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for write in writes(fleet.world, began):
        if write.resource == "services":
            times[write.namespace, write.name].append(write.at)
    assert all(len(pair) == 2 for pair in times.values()) and len(times) == len(numbers), times
    _add_p99(report, "a deleted child is back", [back - gone for gone, back in times.values()], 2)


def _idle(world: World, operator: OperatorProcess, report: Report) -> None:
    """CPU of quiet seconds, and what a re-list costs besides; and what is written meanwhile."""
    began, resyncs = time.time(), _resyncs(operator)
    seconds: list[float] = []
    last = used(operator.pid)
    for _ in range(IDLE_SECONDS):
        time.sleep(1)
        now = used(operator.pid)
        seconds.append(now - last)
        last = now
    resyncs = _resyncs(operator) - resyncs
    assert resyncs >= 2, "re-lists took place"
    quiet = statistics.mean(second for second in seconds if second < BUSY)  # the clock ticks in hundredths
    each = (sum(seconds) - quiet * len(seconds)) / resyncs
    report.add(f"writes but the Lease's in {resyncs:.0f} re-lists", _not_leases(world, began), 0, "", 0)
    report.add("CPU while nothing happens", 100 * quiet, None, " %")
    report.add("CPU seconds of a re-list", each, None, " s")
    report.add(
        f"CPU with a re-list every {Settings.resync_seconds} s",
        100 * (quiet + each / Settings.resync_seconds),
        1,
        " %",
    )


def _take_over(
    fleet: Fleet, operator: OperatorProcess, start: Callable[[str], OperatorProcess], report: Report
) -> None:
    world = fleet.world
    for name, number, bound in (("SIGTERM", signal.SIGTERM, 2.0), ("SIGKILL", signal.SIGKILL, 20.0)):
        standby = start(f"after-{name.lower()}")
        eventually("the standby is up", lambda replica=standby: replica.ask("/readyz")[0] == 200)  # type: ignore[misc]  # mypy infers no lambda that has a default
        began, clock = time.time(), time.monotonic()
        operator.send(number)
        _wait_leading(world, standby)
        report.add(f"takeover after {name}", time.monotonic() - clock, bound, " s")
        _wait_all_looked_at(fleet, standby)
        report.add(f"writes but the Lease's after {name}", _not_leases(world, began), 0, "", 0)
        operator = standby
    operator.stop()
    began, clock = time.time(), time.monotonic()
    operator = start("cold")
    _wait_all_looked_at(fleet, operator)
    report.add(f"start of the process to all {fleet.size} looked at", time.monotonic() - clock, 30, " s")
    wait_idle(operator)
    report.add("writes but the Lease's after a restart", _not_leases(world, began), 0, "", 0)
    report.add("memory after a restart (RSS)", megabytes(operator.pid), 150, " MB", 0)


def _wait_leading(world: World, replica: OperatorProcess) -> None:
    eventually("it leads", lambda: world.lease_holder() == replica.name, seconds=40, poll=0.02)


def _wait_all_looked_at(fleet: Fleet, operator: OperatorProcess) -> None:
    eventually("all looked at", lambda: reconciles(operator) >= fleet.size, seconds=120, poll=0.1)


def _steadily(do: Callable[[int], None], numbers: Iterable[int]) -> None:
    began = time.monotonic()
    for index, number in enumerate(numbers):
        time.sleep(max(0.0, began + index / PER_SECOND - time.monotonic()))
        do(number)


def _resyncs(operator: OperatorProcess) -> float:
    return operator.metrics().get('quire_operator_resync_total{result="ok"}', 0)


def _not_leases(world: World, since: float) -> int:
    return sum(w.user == OPERATOR and w.resource != "leases" for w in writes(world, since))


def _add_p99(report: Report, what: str, seconds: list[float], bound: float) -> None:
    report.add(f"{what}, median", statistics.median(seconds), None, " s")
    report.add(f"{what}, p99", statistics.quantiles(seconds, n=100)[98], bound, " s")


def _write(report: Report, seconds: float) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    RESULTS.write_text(
        f"# The operator with {SIZE} LLMDeployments\n\n"
        "Writes and their times are read off the API server's audit log.\n\n"
        f"{report.table()}\n"
        f"{os.cpu_count()} CPUs, Python {platform.python_version()}, {commit}, {seconds / 60:.0f} minutes.\n"
        "Command: `python -m bench.operator`.\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
