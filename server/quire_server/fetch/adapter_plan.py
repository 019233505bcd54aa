"""What ``quire-server fetch-adapters`` does next: which downloads begin and end, what is published and
deleted, and what is said of each adapter. Pure.

An adapter whose entry changed keeps its old content until the new one is whole. Of those that wait, the ones
that failed least often come first, so that a broken one holds up no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire_server.fetch.adapter_list import AdapterList, Entry
from quire_server.model_dir.adapter_layout import is_adapter_name
from quire_server.termination import Reason

MAX_DOWNLOADS = 2
_FIRST_DELAY, _MAX_DELAY = 5.0, 300.0
_MAX_MESSAGE = 1000
_MAX_FILE_NAME = 240  # leaves room for a suffix

Document = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Download:
    """One that runs: the key of its entry, and how far it is."""

    key: str
    num_bytes: int = 0
    total_bytes: int = 0


_NONE = Download("")


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a download has left on the disk, whole and checked."""

    key: str
    revision: str
    size: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the last try with this key failed, how many have, and when the next one is due."""

    key: str
    reason: str
    message: str
    count: int = 1
    retry_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Observed:
    """``published``: the keys of the contents that a server sees. ``items``: what lies in the folder of each
    adapter's contents, finished or not. ``stated``: the files with states.
    """

    running: Mapping[str, Download] = field(default_factory=dict)
    fetched: Mapping[str, Fetched] = field(default_factory=dict)
    failures: Mapping[str, Failure] = field(default_factory=dict)
    published: Mapping[str, str] = field(default_factory=dict)
    items: Mapping[str, frozenset[str]] = field(default_factory=dict)
    stated: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """``remove``: adapters that left the list. ``prune``: items of others that are needed no more.
    ``states``: all that are to be on the disk, by the names of their files; ``unsaid``: those that are not.
    """

    stop: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    publish: tuple[Entry, ...] = ()
    prune: tuple[tuple[str, str], ...] = ()
    start: tuple[Entry, ...] = ()
    states: Mapping[str, Document] = field(default_factory=dict)
    unsaid: tuple[str, ...] = ()


def make_plan(wanted: AdapterList, observed: Observed, now: float) -> Plan:
    """The next step."""
    keys = {entry.name: entry.key for entry in wanted.entries}
    listed = keys.keys() | {refusal.name for refusal in wanted.refusals}
    running = observed.running
    there = observed.published.keys() | observed.items.keys()
    waiting = [entry for entry in wanted.entries if _is_due(entry, observed, now)]
    states = _states(wanted, observed)
    return Plan(
        stop=tuple(name for name, one in running.items() if keys.get(name) != one.key),
        remove=tuple(sorted(there - listed - running.keys())),
        publish=tuple(entry for entry in waiting if _is_fetched(entry, observed)),
        prune=tuple(
            (entry.name, item)
            for entry in wanted.entries
            if entry.name not in running
            for item in sorted(observed.items.get(entry.name, ()))
            if _is_spare(entry, item, observed)
        ),
        start=_next(waiting, observed),
        states=states,
        unsaid=tuple(sorted(observed.stated - states.keys())),
    )


def failed(before: Failure | None, key: str, reason: str, message: str, now: float) -> Failure:
    """One more failure, and a delay that doubles with each."""
    count = before.count + 1 if before is not None and before.key == key else 1
    delay = min(_MAX_DELAY, _FIRST_DELAY * 2.0 ** (count - 1))
    return Failure(key, reason, message[:_MAX_MESSAGE], count, now + delay)


def state_file(name: str) -> str:
    """Where the state of a name is, which may be no name at all."""
    if is_adapter_name(name) and len(name) <= _MAX_FILE_NAME:
        return f"{name}.json"
    return f".{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def _is_due(entry: Entry, observed: Observed, now: float) -> bool:
    """Whether anything is to be done for an entry, and now."""
    failure = _failure(entry, observed)
    is_done = _is_fetched(entry, observed) and observed.published.get(entry.name) == entry.key
    return not is_done and entry.name not in observed.running and (failure is None or now >= failure.retry_at)


def _is_fetched(entry: Entry, observed: Observed) -> bool:
    """Whether its content is there, as its download left it."""
    fetched, items = observed.fetched.get(entry.name), observed.items.get(entry.name, frozenset())
    return fetched is not None and fetched.key == entry.key and entry.key in items


def _is_spare(entry: Entry, item: str, observed: Observed) -> bool:
    """Whether an item is of an earlier entry and not in use; or is half an adapter that has no room, whose
    room another one may need.
    """
    failure = _failure(entry, observed)
    is_full = failure is not None and failure.reason == Reason.OUT_OF_DISK.value
    if entry.key in item:
        return is_full and item.endswith(".part")
    return observed.published.get(entry.name) != item


def _failure(entry: Entry, observed: Observed) -> Failure | None:
    failure = observed.failures.get(entry.name)
    return failure if failure is not None and failure.key == entry.key else None


def _next(waiting: list[Entry], observed: Observed) -> tuple[Entry, ...]:
    def num_failures(entry: Entry) -> int:
        failure = _failure(entry, observed)
        return 0 if failure is None else failure.count

    ready = sorted((entry for entry in waiting if not _is_fetched(entry, observed)), key=num_failures)
    return tuple(ready[: max(0, MAX_DOWNLOADS - len(observed.running))])


def _states(wanted: AdapterList, observed: Observed) -> dict[str, Document]:
    states = {state_file(entry.name): _state(entry, observed) for entry in wanted.entries}
    for refusal in wanted.refusals:
        failure = Failure("", "ConfigError", refusal.message[:_MAX_MESSAGE])
        states[state_file(refusal.name)] = _document(refusal.name, "Failed", failure=failure)
    return states


def _state(entry: Entry, observed: Observed) -> Document:
    """A try again says Failed until it has any bytes, so that a reason can be read for longer than an
    instant.
    """
    name, fetched = entry.name, observed.fetched.get(entry.name)
    published, failure = observed.published.get(name), _failure(entry, observed)
    revision = fetched.revision if fetched is not None and fetched.key == published else ""
    download = observed.running.get(name, _NONE)
    download = download if download.key == entry.key else _NONE
    if fetched is not None and _is_fetched(entry, observed) and published == entry.key:
        done = Download(entry.key, fetched.size, fetched.size)
        return _document(name, "Fetched", done, revision)
    if failure is not None and not download.num_bytes:
        return _document(name, "Failed", download, revision, failure)
    return _document(name, "Fetching", download, revision)


def _document(
    name: str,
    state: str,
    download: Download = _NONE,
    revision: str = "",
    failure: Failure | None = None,
) -> Document:
    return {
        "name": name,
        "state": state,
        "bytes": download.num_bytes,
        "total_bytes": download.total_bytes,
        "reason": "" if failure is None else failure.reason,
        "message": "" if failure is None else failure.message,
        "revision": revision,
    }
