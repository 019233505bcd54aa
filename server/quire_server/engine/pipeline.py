"""Steps on their way from the scheduler through the runner and back: one at a time, or two where the device
computes by itself, so that the next step is decided and handed over while it is busy with the one before.

Called by `loop`. Decides nothing: whether a step can be ahead of a result is the scheduler's business, and
what is still to be done on the device is the runner's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire_server.core.scheduler import Scheduler
from quire_server.core.step import Step, StepEvents, StepResult

Flying = tuple[Step, Callable[[], StepResult]]


class Launcher(Protocol):
    """What executes steps. ``launch`` returns before the result is there where it ``is_asynchronous``;
    calling what it returns waits for it. Results are asked for in the order of the launches.
    """

    @property
    def is_asynchronous(self) -> bool: ...

    def launch(self, step: Step) -> Callable[[], StepResult]: ...


class Pipeline:
    """A scheduler and what executes its steps."""

    def __init__(self, scheduler: Scheduler, runner: Launcher) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._flying: Flying | None = None  # launched, not committed

    def advance(self) -> tuple[Step, StepEvents] | None:
        """Commit one step. None: there is work, and it cannot be scheduled now."""
        flying = self._flying or self._launch()
        if flying is None:
            return None
        self._flying = self._launch() if self._runner.is_asynchronous else None
        step, wait = flying
        return step, self._scheduler.commit(step, wait())

    def _launch(self) -> Flying | None:
        step = self._scheduler.schedule()
        return None if step is None else (step, self._runner.launch(step))
