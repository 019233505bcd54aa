"""``quire-server fetch-adapters --list FILE --to DIR``: keeps a directory of LoRA adapters as a list says,
while the list changes. It runs beside a server, which loads what appears there and drops what goes.

The contents of an adapter lie in DIR/.fetched/NAME, each under the key of its entry, and DIR/NAME is a link
to the newest whole one: so a server sees all of it or none, and what a download leaves is found again after a
restart. DIR/.state/NAME.json says how each one is. ``adapter_plan`` decides; here it is carried out. Only a
signal ends this process: what fails is logged, said in the state, and tried again.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NoReturn

from quire_server import log
from quire_server.errors import ConfigError, QuireServerError
from quire_server.fetch import adapter_list, adapter_plan
from quire_server.fetch.adapter_list import MAX_LIST_BYTES, AdapterList, Entry
from quire_server.fetch.adapter_plan import Document, Failure, Fetched, Observed
from quire_server.fetch.download_process import DownloadProcess
from quire_server.model_dir.adapter_layout import STATE_FOLDER
from quire_server.termination import Reason

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
_CONTENTS = ".fetched"


def run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Follow the list until a signal comes."""
    wanted = parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_at_once)
    log.configure("adapters", "info")
    sidecar = AdapterSidecar(wanted.list, wanted.to.absolute(), wanted.claims, environ, wanted.allow_env)
    while True:
        sidecar.step(LOOK_SECONDS)


def _exit_at_once(number: int, _: object) -> NoReturn:
    """The kernel ends the downloads with this process; a later run resumes them."""
    os._exit(0)


class AdapterSidecar:
    """Used by one thread. ``more_variables``: that entries may set, beside the known ones."""

    def __init__(
        self,
        listing: Path,
        to: Path,
        claims: PurePosixPath,
        environ: Mapping[str, str],
        more_variables: Collection[str] = (),
    ) -> None:
        self._listing, self._to, self._claims, self._environ = listing, to, claims, environ
        self._more_variables = more_variables
        self._contents, self._states = to / _CONTENTS, to / STATE_FOLDER
        self._wanted: AdapterList | None = None  # until there is a good list
        self._data: bytes | None = None
        self._running: dict[str, DownloadProcess] = {}
        self._fetched: dict[str, Fetched] = {}
        self._failures: dict[str, Failure] = {}
        self._written: dict[str, Document] = {}  # states, by file
        self._problems: dict[str, str] = {}  # what was logged last, by what it is about
        self._selector = selectors.DefaultSelector()

    def step(self, seconds: float) -> None:
        """Carry out what is to be done now, then wait for a download to say something, at most so long."""
        self._read_list()
        if self._wanted is not None:
            self._do("the directory of adapters", functools.partial(self._carry_out, self._wanted))
        self._selector.select(seconds)
        for name, process in list(self._running.items()):
            if process.read():
                self._end(name, process)

    def _read_list(self) -> None:
        """Take a new list over; keep the last good one where it cannot be read."""

        def take() -> None:
            with self._listing.open("rb") as file:
                data = file.read(MAX_LIST_BYTES + 1)
            if data != self._data:
                self._wanted = adapter_list.parse(data, self._claims, self._more_variables)
                self._data = data
                for refusal in self._wanted.refusals:
                    logger.warning(
                        "an entry is refused", extra={"adapter": refusal.name, "why": refusal.message}
                    )

        self._do(f"the list {self._listing}", take)

    def _carry_out(self, wanted: AdapterList) -> None:
        for folder in (self._to, self._contents, self._states):
            folder.mkdir(exist_ok=True)
        plan = adapter_plan.make_plan(wanted, self._observe(), time.monotonic())
        for name in plan.stop:
            self._running[name].kill()
        for name in plan.remove:
            self._do(name, functools.partial(self._remove, name))
        for entry in plan.publish:
            self._publish(entry)
        for name, item in plan.prune:
            self._do(name, functools.partial(_delete, self._contents / name / item))
        for entry in plan.start:
            self._start(entry)
        for name in plan.unsaid:
            self._do(f"the state {name}", (self._states / name).unlink)
            self._written.pop(name, None)
        for name, document in plan.states.items():
            if self._written.get(name) != document:
                self._do(f"the state {name}", functools.partial(self._write_state, name, document))

    def _observe(self) -> Observed:
        links = {path.name: os.readlink(path) for path in self._to.iterdir() if path.is_symlink()}
        return Observed(
            running={name: process.progress() for name, process in self._running.items()},
            fetched=dict(self._fetched),
            failures=dict(self._failures),
            published={
                name: target.rpartition("/")[2]
                for name, target in links.items()
                if target.startswith(f"{_CONTENTS}/{name}/")
            },
            items={
                path.name: frozenset(os.listdir(path)) for path in self._contents.iterdir() if path.is_dir()
            },
            stated=frozenset(os.listdir(self._states)),
        )

    def _start(self, entry: Entry) -> None:
        folder = self._contents / entry.name
        try:
            folder.mkdir(exist_ok=True)
            process = DownloadProcess(entry, folder / entry.key, self._claims, self._environ)
        except ConfigError as error:
            self._fail(entry.name, entry.key, Reason.CONFIG_ERROR.value, str(error))
        except OSError as error:
            why = f"Its download cannot be started ({error.strerror}). Look at the volume and the limits."
            self._fail(entry.name, entry.key, Reason.MODEL_DOWNLOAD_FAILED.value, why)
        else:
            self._running[entry.name] = process
            self._selector.register(process.output, selectors.EVENT_READ)

    def _end(self, name: str, process: DownloadProcess) -> None:
        """A download has ended."""
        self._selector.unregister(process.output)
        process.close()
        del self._running[name]
        if process.is_killed:  # its entry has changed
            return
        outcome = process.outcome()
        if isinstance(outcome, Fetched):
            self._fetched[name] = outcome
            self._failures.pop(name, None)
        else:
            self._fail(name, process.key, *outcome, output=process.complaints())

    def _publish(self, entry: Entry) -> None:
        name, fetched = entry.name, self._fetched[entry.name]
        new = self._contents / name / ".new"
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(f"{_CONTENTS}/{name}/{entry.key}")
            os.replace(new, self._to / name)
        except OSError as error:
            why = f"{self._to / name} cannot be written ({error.strerror}). Remove what is there."
            self._fail(name, entry.key, Reason.OUT_OF_DISK.value, why)
        else:
            self._failures.pop(name, None)
            facts = {"adapter": name, "revision": fetched.revision, "bytes": fetched.size}
            logger.info("an adapter is fetched", extra=facts)

    def _remove(self, name: str) -> None:
        """The link first: a server drops the adapter, and its files go afterwards."""
        if (self._to / name).is_symlink():
            (self._to / name).unlink()
            logger.info("an adapter is removed", extra={"adapter": name})
        if (self._contents / name).exists():
            shutil.rmtree(self._contents / name)
        self._fetched.pop(name, None)
        self._failures.pop(name, None)

    def _write_state(self, name: str, document: Document) -> None:
        new = self._states / f".{name}.new"
        new.write_text(json.dumps(document), encoding="utf-8")
        os.replace(new, self._states / name)
        self._written[name] = document

    def _fail(self, name: str, key: str, reason: str, message: str, output: str = "") -> None:
        before = self._failures.get(name)
        failure = adapter_plan.failed(before, key, reason, message, time.monotonic())
        self._failures[name] = failure
        if before is None or (before.key, before.message) != (key, failure.message):
            facts = {"adapter": name, "reason": reason, "why": message, "output": output}
            logger.warning("an adapter is not fetched", extra=facts)

    def _do(self, about: str, work: Callable[[], object]) -> bool:
        """Do something that may fail; returns whether it did not. A failure is logged once, until it
        changes.
        """
        try:
            work()
        except (OSError, QuireServerError) as error:
            if self._problems.get(about) != str(error):
                self._problems[about] = str(error)
                logger.warning("this is tried again", extra={"about": about, "why": str(error)})
            return False
        self._problems.pop(about, None)
        return True


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def parser() -> argparse.ArgumentParser:
    """The argument parser; a contract test parses the operator's arguments with it."""
    built = argparse.ArgumentParser(
        prog="quire-server fetch-adapters",
        allow_abbrev=False,
        description="Keep a directory of LoRA adapters as a list says, while the list changes: what is new "
        "in it is fetched, what has left it is deleted, and what fails is tried again. For --adapters-dir of "
        "a server.",
    )
    built.add_argument(
        "--list",
        required=True,
        type=Path,
        metavar="FILE",
        help='JSON: {"adapters": [{"name": ..., "source": ... or "path": ..., "anonymous": true or false, '
        '"environment": {VARIABLE: TEXT}, "files": {VARIABLE: PATH}}]}',
    )
    built.add_argument("--to", required=True, type=Path, metavar="DIR", help="the directory of the adapters")
    built.add_argument(
        "--claims",
        type=PurePosixPath,
        default=PurePosixPath("/adapter-claims"),
        metavar="DIR",
        help="below it lies every path of the list, links resolved (default: /adapter-claims)",
    )
    built.add_argument(
        "--allow-env",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable that entries may set beside the known ones; may be repeated",
    )
    return built
