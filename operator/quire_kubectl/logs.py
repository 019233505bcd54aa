"""``kubectl quire logs``: the logs of all containers of an LLMDeployment's pods, preceded by why containers
ended badly.

Each container is read by its own kubectl process. With -f a thread reads it, a watch finds new pods and
restarted containers, and an interrupted stream is resumed where it broke.
"""

from __future__ import annotations

import argparse
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from quire_kubectl import kubectl, view
from quire_kubectl.kubectl import Document, KubectlError
from quire_kubectl.printed_lines import PrintedLines
from quire_kubectl.terminal import PREFIXES, Look
from quire_operator import names
from quire_operator.reports import parse_termination

NOTHING_SAID = 3
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e]")
_AGAIN_SECONDS = 0.5  # before an interrupted stream is resumed, doubled while it delivers nothing
_AGAIN_AT_MOST_SECONDS = 8.0
_LINES_AT_ONCE = 1000  # buffered for printing; beyond it, reading pauses


@dataclass(frozen=True)
class LogSource:
    """One run of one container; `restarts` identifies the run. `running`: it may write more."""

    pod: str
    container: str
    restarts: int
    running: bool

    @property
    def title(self) -> str:
        return self.pod if self.container == names.CONTAINER else f"{self.pod} {self.container}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As kubectl's own."""
    parser.add_argument("name", metavar="NAME", help="of an LLMDeployment")
    parser.add_argument("-n", "--namespace", help="(default: that of kubectl's context)")
    parser.add_argument("-f", "--follow", action="store_true", help="of later pods, too, until Ctrl-C")
    parser.add_argument("-p", "--previous", action="store_true", help="of the containers that ended before")
    parser.add_argument(
        "--tail", type=int, default=-1, metavar="LINES", help="of each container (default: all)"
    )


def run(arguments: argparse.Namespace, out: TextIO = sys.stdout) -> int:
    """0: printed; 3: no container has written anything. Raises KubectlError."""
    if arguments.follow and arguments.previous:
        raise KubectlError("give -f or -p, not both: what has ended says nothing more")
    scope = ["--namespace", arguments.namespace] if arguments.namespace else []
    kubectl.run(
        ["get", kubectl.LLM_DEPLOYMENTS, arguments.name, *scope]
    )  # fails where there is no such LLMDeployment
    command = ["pods", *scope, "-l", names.selector_of_all_roles(arguments.name)]
    printer = _Printer(out)
    pods = kubectl.documents(["get", *command])
    for line in (line for pod in pods for line in _endings(pod)):
        out.write(f"{printer.look.paint(line, 'red')}\n")
    if arguments.follow:
        _follow(command, scope, arguments.tail, printer)
    sources = [one for pod in pods for one in _sources(pod, previous=arguments.previous)]
    options = [*scope, f"--tail={arguments.tail}", *(["--previous"] if arguments.previous else [])]
    failed = [source.title for source in sources if not _print(source, options, printer)]
    if failed:
        raise KubectlError(f"the log of {', '.join(failed)} could not be read; kubectl's words stand above")
    if not sources:
        what = "no container has ended before" if arguments.previous else "no container has started"
        sys.stderr.write(f"{arguments.name}: {what}; kubectl quire status {arguments.name} says why\n")
    return 0 if sources else NOTHING_SAID


class _Printer:
    """Prefixes lines with the name of their pod, each pod in its own colour."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.look = Look.of(out)
        self._colours: dict[str, str] = {}

    def line(self, source: LogSource, line: str) -> None:
        colour = self._colours.setdefault(source.pod, PREFIXES[len(self._colours) % len(PREFIXES)])
        prefix = self.look.paint(f"[{view.text(source.title)}]", colour)
        self._out.write(f"{prefix} {_CONTROL.sub(' ', line)}\n")

    def flush(self) -> None:
        self._out.flush()


def _print(source: LogSource, options: Sequence[str], printer: _Printer) -> bool:
    """Whether kubectl could read the log; it reports why not itself."""
    child = kubectl.start(_logs(source, options))
    try:
        assert child.stdout is not None
        for line in child.stdout:
            printer.line(source, line.rstrip("\n"))
        return child.wait() == 0
    finally:
        kubectl.stop(child)


class _Followed:
    """The containers that are read now. `lines`: each with its source; None or an error ends the queue."""

    def __init__(self) -> None:
        self.lines: queue.Queue[tuple[LogSource | None, str]] = queue.Queue(_LINES_AT_ONCE)
        self.children: list[subprocess.Popen[str]] = []
        self._runs: dict[tuple[str, str], LogSource] = {}
        self._changed = threading.Condition()

    def update(self, pod: str, sources: Iterable[LogSource]) -> list[LogSource]:
        """Update the containers of a pod; returns those that are new."""
        current = {(one.pod, one.container): one for one in sources}
        with self._changed:
            new = [one for place, one in current.items() if place not in self._runs]
            ended = {
                place: replace(one, running=False) for place, one in self._runs.items() if place[0] == pod
            }
            self._runs |= ended | current
            self._changed.notify_all()
        return new

    def forget(self, pod: str) -> None:
        """The pod is deleted."""
        with self._changed:
            self._runs = {place: one for place, one in self._runs.items() if place[0] != pod}
            self._changed.notify_all()

    def now(self, source: LogSource) -> LogSource | None:
        """The current run of that container; None when its pod is deleted."""
        return self._runs.get((source.pod, source.container))

    def wait(self, source: LogSource, seconds: float | None) -> LogSource | None:
        """The current run of that container, once it changes or after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.now(source) != source, seconds)
            return self.now(source)


def _follow(command: Sequence[str], scope: Sequence[str], tail: int, printer: _Printer) -> None:
    """Until the watch fails for too long or the user interrupts."""
    followed = _Followed()
    threading.Thread(target=_watch, args=(command, scope, tail, followed), daemon=True).start()
    try:
        while True:
            source, line = followed.lines.get()
            if source is None:
                raise KubectlError(line)
            printer.line(source, line)
            if followed.lines.empty():
                printer.flush()
    finally:
        for child in followed.children:
            child.terminate()


def _watch(command: Sequence[str], scope: Sequence[str], tail: int, followed: _Followed) -> None:
    try:
        with kubectl.watch(command, patience=kubectl.PATIENCE_SECONDS) as events:
            for change, pod in events:
                name = str(pod["metadata"]["name"])
                if change == "DELETED":
                    followed.forget(name)
                    continue
                for source in followed.update(name, _sources(pod)):
                    threading.Thread(target=_read, args=(source, scope, tail, followed), daemon=True).start()
    except KubectlError as error:
        followed.lines.put((None, str(error)))


def _read(first: LogSource, scope: Sequence[str], tail: int, followed: _Followed) -> None:
    """Reads one container, run after run, until its pod is deleted. While it runs, the end of a stream is an
    interruption.
    """
    shown, pause = PrintedLines(), _AGAIN_SECONDS
    source: LogSource | None = first
    while source is not None:
        since = shown.since
        options = [*scope, "--follow", "--timestamps", f"--since-time={since}" if since else f"--tail={tail}"]
        child = kubectl.start(_logs(source, options))
        followed.children.append(child)
        assert child.stdout is not None
        said = False
        for line in shown.news(child.stdout, may_be_cut=source.running):
            followed.lines.put((source, line))
            said = True
        followed.children.remove(child)
        if child.wait() and not said and _is_gone(source, scope):
            return
        pause = _AGAIN_SECONDS if said else min(2 * pause, _AGAIN_AT_MOST_SECONDS)
        source = followed.wait(source, pause if source.running else None)


def _is_gone(source: LogSource, scope: Sequence[str]) -> bool:
    """Whether the pod was deleted while no watch was running."""
    try:
        return not kubectl.run(["get", "pod", source.pod, *scope, "--ignore-not-found", "-o", "name"])
    except KubectlError:
        return False  # the API server is unreachable, or the right is missing


def _logs(source: LogSource, options: Sequence[str]) -> list[str]:
    return ["logs", source.pod, "-c", source.container, *options]


def _sources(pod: Document, *, previous: bool = False) -> Iterator[LogSource]:
    """The containers that have a log; with `previous` the runs before the last restart."""
    for container in _statuses(pod):
        count = int(container.get("restartCount") or 0)
        state = container.get("state") or {}
        if count if previous else ("running" in state or "terminated" in state):
            yield LogSource(str(pod["metadata"]["name"]), str(container["name"]), count, "running" in state)


def _endings(pod: Document) -> Iterator[str]:
    """The containers that last ended badly, with their termination messages."""
    for container in _statuses(pod):
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            ended = state.get("terminated") or {}
            if not ended.get("exitCode"):
                continue
            wrote = parse_termination(ended.get("message"))
            reason = wrote.reason or view.text(ended.get("reason"))
            where = f"{view.text(pod['metadata']['name'])} {view.text(container.get('name'))}"
            yield (
                f"[{where}] ended with {ended['exitCode']} ({reason}) at {view.text(ended.get('finishedAt'))}"
                f"{f': {wrote.message}' if wrote.message else ''}"
            )
            break


def _statuses(pod: Document) -> list[dict[str, Any]]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
