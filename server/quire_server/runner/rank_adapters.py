"""LoRA adapters of a model divided among ranks: rank 0 decides which ones are read and kept, under which
number; each rank reads its own parts from the files.

An adapter is loaded when all ranks have read the same content. Where one could not, all of them forget it,
and the reason is that rank's; what was loaded before stays. Orders and reports travel with steps and echoes,
so a rank that reads keeps no step waiting. Knows no names of adapters.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from weakref import finalize

from quire_server.core.rank_step import AdapterOrder, AdapterReport
from quire_server.errors import ConfigError
from quire_server.models.adapter_file import AdapterFile
from quire_server.runner.adapters import Adapters, reason_of


class OtherRanks(Protocol):
    """The way to the other ranks, from rank 0. ``adapter_orders``: go with the next step; thread-safe."""

    adapter_orders: deque[AdapterOrder]

    def exchange_adapters(self) -> list[tuple[int, AdapterReport]]:
        """Send orders and ask for reports now, unless steps do; returns what was reported since."""


@dataclass(eq=False, slots=True)
class _Loading:
    """An adapter that is read. ``own``: rank 0's part; ``whole``: done when all ranks have read theirs."""

    own: "Future[AdapterFile]"
    whole: "Future[AdapterFile]" = field(default_factory=Future)
    reports: dict[int, AdapterReport] = field(default_factory=dict)  # by rank


class LeaderAdapters:
    """Rank 0's, as `Adapters` for one rank. The others forget an adapter when rank 0 has no reference to its
    file any more, however that comes about.
    """

    def __init__(self, own: Adapters, others: OtherRanks, num_others: int) -> None:
        self._own, self._others, self._num_others = own, others, num_others
        self._orders = others.adapter_orders
        self._loading: dict[int, _Loading] = {}

    def begin(self, number: int, directory: Path, replaces: int = 0) -> "Future[AdapterFile]":
        """Have all ranks read an adapter. It is done when each has, which `exchange` finds out."""
        self._orders.append(AdapterOrder(number, str(directory), replaces))
        self._loading[number] = started = _Loading(self._own.begin(number, directory, replaces))
        return started.whole

    def exchange(self) -> bool:
        """Send orders, and take in what the ranks have read. Whether to call it again soon."""
        if not (self._orders or self._loading):
            return False
        for rank, report in self._others.exchange_adapters():
            if (started := self._loading.get(report.number)) is not None:
                started.reports[rank] = report
        for number, started in tuple(self._loading.items()):
            if started.own.done() and len(started.reports) == self._num_others:
                del self._loading[number]
                self._end(number, started)
        return bool(self._orders or self._loading)

    def add(self, number: int, file: AdapterFile) -> None:
        """Keep an adapter on the host."""
        self._own.add(number, file)

    def remove(self, number: int) -> None:
        """Drop it, if it was added; no request may use it any more."""
        self._own.remove(number)

    def load(self, slot: int, number: int) -> None:
        """Copy rank 0's part of an adapter to a slot."""
        self._own.load(slot, number)

    def _end(self, number: int, started: _Loading) -> None:
        if (error := started.own.exception()) is None:
            error = _refusal(started)
        if error is not None:
            self._forget(number)
            started.whole.set_exception(error)
            return
        file = started.own.result()
        finalize(file, self._forget, number)
        started.whole.set_result(file)

    def _forget(self, number: int) -> None:
        self._orders.append(AdapterOrder(number, "", 0))


class FollowerAdapters:
    """Another rank's: does what rank 0 orders."""

    def __init__(self, own: Adapters) -> None:
        self._own = own
        self._reading: dict[int, tuple[str, Future[AdapterFile]]] = {}

    def obey(self, orders: Iterable[AdapterOrder]) -> None:
        """Begin to read, or forget."""
        for number, directory, replaces in orders:
            if directory:
                self._reading[number] = directory, self._own.begin(number, Path(directory), replaces)
            else:
                self._reading.pop(number, None)
                self._own.remove(number)

    def load(self, loads: Iterable[tuple[int, int]]) -> None:
        """Copy adapters to slots: (slot, number) of each."""
        for slot, number in loads:
            self._own.load(slot, number)

    def reports(self) -> tuple[AdapterReport, ...]:
        """What was read since the last call, and is kept now."""
        done = [number for number, (_, future) in self._reading.items() if future.done()]
        return tuple(self._report(number, *self._reading.pop(number)) for number in done)

    def _report(self, number: int, directory: str, future: "Future[AdapterFile]") -> AdapterReport:
        if (error := future.exception()) is not None:
            return AdapterReport(number, "", reason_of(error, directory))
        file = future.result()
        self._own.add(number, file)
        return AdapterReport(number, file.digest, "")


def _refusal(started: _Loading) -> ConfigError | None:
    """Why an adapter that rank 0 has read is not loaded, from the reports of all others."""
    for rank, report in sorted(started.reports.items()):
        if report.reason:
            return ConfigError(f"Rank {rank}: {report.reason}")
        if report.digest != started.own.result().digest:
            return ConfigError(
                f"Rank {rank} has read another content than rank 0: its files changed meanwhile, or its node "
                "has not downloaded it yet. It is read again in a minute."
            )
    return None
