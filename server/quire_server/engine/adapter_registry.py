"""The LoRA adapters that an engine has, by name: loaded beside the steps, dropped when no request needs
them any more.

A name may get other content: its requests so far keep what they began with, new ones get the new content once
it is read. What cannot be read leaves all others, and an earlier content of the same name, as they are; the
reason stays until the name is loaded or dropped again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire_server.core.adapter_slots import AdapterSlots
from quire_server.core.step import ADAPTER_GONE
from quire_server.engine.messages import AdapterState, LoadAdapter
from quire_server.errors import RequestError
from quire_server.models.adapter_file import AdapterFile, NoRoomError
from quire_server.runner.adapters import reason_of

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 256  # on the host
_IS_USED = (
    " The earlier content of this name answers meanwhile, and its memory counts as free only when no request "
    "uses it as the new one is read, which is tried again in a minute."
)


class AdapterStore(Protocol):
    """The runner's adapters, by number. ``begin`` reads on another thread, maybe on several ranks;
    ``exchange`` takes part in what these do, and returns whether to call it again soon.
    """

    def begin(self, number: int, directory: Path, replaces: int) -> Future[AdapterFile]: ...

    def exchange(self) -> bool: ...

    def add(self, number: int, file: AdapterFile) -> None: ...

    def remove(self, number: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded content. ``key``: of its name and content, which separates its KV blocks."""

    number: int
    key: str
    digest: str
    rank: int
    size: int


@dataclass(slots=True)
class _Entry:
    load_id: str
    adapter: Adapter | None = None
    loading: Future[AdapterFile] | None = None
    number: int = 0  # of what is loading
    path: str = ""
    reason: str = ""


class AdapterRegistry:
    """Used by the engine's thread only. ``store`` is None where the server has no adapters."""

    def __init__(self, store: AdapterStore | None, slots: AdapterSlots) -> None:
        self._store, self._slots = store, slots
        self._entries: dict[str, _Entry] = {}
        self._dropped: set[int] = set()  # numbers that requests may still use
        self._last_number = 0
        self._names: dict[int, str] = {}  # of all numbers that requests may still use
        self._unloaded: dict[str, None] = {}  # names that were dropped and not loaded since, the latest last
        self.is_exchanging = False  # whether to call ``advance`` again soon
        self.wake: Callable[[], object] = bool  # called when something is read, maybe from another thread

    def find(self, name: str) -> Adapter | None:
        """The adapter of a request, None for the model itself. Raises RequestError where it is not loaded."""
        if error := self.missing(name):
            raise RequestError(error, param="model")
        return self._entries[name].adapter if name else None

    def missing(self, name: str) -> str:
        """Why a request for this name would be refused; empty where it would not be."""
        entry = self._entries.get(name)
        is_there = not name or (entry is not None and entry.adapter is not None)
        return "" if is_there else ADAPTER_GONE

    def apply(self, loads: Iterable[LoadAdapter], drops: Iterable[str]) -> bool:
        """Begin to load, and drop. Returns whether any state changed."""
        has_changed = False
        for name in drops:
            entry = self._entries.pop(name, None)
            if entry is not None:
                self._drop(entry.adapter)
                self._unloaded[name] = None
                has_changed = True
        while len(self._unloaded) > MAX_ADAPTERS:
            del self._unloaded[next(iter(self._unloaded))]
        for load in loads:
            has_changed = True
            self._load(load)
        return has_changed

    def advance(self) -> bool:
        """Take in what was read, and forget what no request uses any more. Returns whether any state
        changed.
        """
        has_changed = False
        if self._store is not None:
            self.is_exchanging = self._store.exchange()
        for name, entry in self._entries.items():
            if entry.loading is not None and entry.loading.done():
                self._take(name, entry, entry.loading)
                has_changed = True
        for number in [one for one in self._dropped if not self._slots.is_used(one)]:
            self._dropped.remove(number)
            self._slots.forget(number)
            del self._names[number]
            assert self._store is not None
            self._store.remove(number)
        return has_changed

    def states(self) -> tuple[AdapterState, ...]:
        """Of all names, in their order."""
        return tuple(_state(name, entry) for name, entry in sorted(self._entries.items()))

    def in_use(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names whose requests run, and whose requests wait, in their order."""
        running, waiting = (tuple(sorted({self._names[one] for one in each})) for each in self._slots.in_use)
        return running, waiting

    @property
    def unloaded(self) -> tuple[str, ...]:
        """Names that were dropped and not loaded since."""
        return tuple(self._unloaded)

    def _load(self, load: LoadAdapter) -> None:
        self._unloaded.pop(load.name, None)
        entry = self._entries.setdefault(load.name, _Entry(load.load_id))
        entry.load_id, entry.reason = load.load_id, ""
        store = self._store
        if store is None:
            entry.reason = "this server runs without --max-adapters (engine.maxAdapters)"
        elif self._num_others(entry) >= MAX_ADAPTERS:
            entry.reason = f"there are {MAX_ADAPTERS} adapters already: drop one"
        else:
            self._last_number += 1
            entry.number, entry.path = self._last_number, load.path
            old = entry.adapter
            replaces = 0 if old is None or self._slots.is_used(old.number) else old.number
            entry.loading = store.begin(entry.number, Path(load.path), replaces)
            entry.loading.add_done_callback(lambda _: self.wake())

    def _num_others(self, entry: _Entry) -> int:
        """Adapters beside this one that are loaded, or will be."""
        others = (other for other in self._entries.values() if other is not entry)
        return sum(other.adapter is not None or other.loading is not None for other in others)

    def _take(self, name: str, entry: _Entry, loading: Future[AdapterFile]) -> None:
        entry.loading = None
        if (error := loading.exception()) is not None:
            entry.reason = reason_of(error, entry.path)
            if entry.adapter is not None and isinstance(error, NoRoomError):
                entry.reason += _IS_USED
            logger.error("an adapter is not loaded", extra={"adapter": name, "why": entry.reason})
            return
        file = loading.result()
        if entry.adapter is not None and entry.adapter.digest == file.digest:
            return
        self._drop(entry.adapter)
        key = f"{name}@{file.digest}"
        entry.adapter = Adapter(entry.number, key, file.digest, file.rank, file.size)
        assert self._store is not None
        self._store.add(entry.number, file)
        self._names[entry.number] = name
        facts = {"adapter": name, "digest": file.digest, "rank": file.rank, "bytes": file.size}
        logger.info("an adapter is loaded", extra=facts)

    def _drop(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._dropped.add(adapter.number)


def _state(name: str, entry: _Entry) -> AdapterState:
    adapter = entry.adapter
    return AdapterState(
        name=name,
        is_ready=adapter is not None,
        is_loading=entry.loading is not None,
        load_id=entry.load_id,
        reason=entry.reason,
        digest="" if adapter is None else adapter.digest,
        rank=0 if adapter is None else adapter.rank,
        size=0 if adapter is None else adapter.size,
    )
