"""A fake asynchronous device, which computes a step only when its result is awaited: everything that is
scheduled in between is scheduled without the results.
"""

from collections.abc import Callable

from quire_server.core.step import Step, StepResult
from tests.server.core.fake_runner import FakeRunner


class FakeDevice:
    """Steps are computed in the order of their launches, as late as possible."""

    def __init__(self, runner: FakeRunner, max_steps_in_flight: int = 2) -> None:
        self.max_steps_in_flight = max_steps_in_flight
        self._runner = runner
        self._launched: list[Step] = []
        self.steps: list[Step] = []
        self._results: dict[int, StepResult] = {}
        self.depths: list[int] = []  # after each launch: steps launched and not computed

    def launch(self, step: Step) -> Callable[[], StepResult]:
        self._launched.append(step)
        self.steps.append(step)
        self.depths.append(len(self._launched))
        return lambda: self._wait(step.step_id)

    def _wait(self, step_id: int) -> StepResult:
        while step_id not in self._results:
            step = self._launched.pop(0)
            self._results[step.step_id] = self._runner.run(step)
        return self._results.pop(step_id)


class FakeHost:
    """The same runner, one step at a time."""

    max_steps_in_flight = 1

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner

    def launch(self, step: Step) -> Callable[[], StepResult]:
        result = self._runner.run(step)
        return lambda: result
