"""Fake stages of a pipeline on a virtual clock: each takes its time for a step and begins when the one before
has ended and its own previous step has. Waking, copying and sampling take none, so that what is lost of the
stages' time is what the scheduler leaves idle, on a loaded machine too.
"""

from collections.abc import Callable, Sequence

from quire_server.core.step import Step, StepResult
from tests.server.core.fake_runner import FakeRunner

Span = tuple[float, float]


class FakeStages:
    """``spans``: of each stage, when it computed. Rank 0 computes the first stage itself."""

    def __init__(self, runner: FakeRunner, seconds: Sequence[float]) -> None:
        self.max_steps_in_flight = len(seconds)
        self.spans: list[list[Span]] = [[] for _ in seconds]
        self.now = 0.0
        self._runner, self._seconds = runner, seconds

    def launch(self, step: Step) -> Callable[[], StepResult]:
        arrived = self.now
        for spans, seconds in zip(self.spans, self._seconds, strict=True):
            begin = max(arrived, spans[-1][1] if spans else 0.0)
            arrived = begin + seconds
            spans.append((begin, arrived))
        self.now = self.spans[0][-1][1]
        return lambda: self._wait(step, arrived)

    def _wait(self, step: Step, ended: float) -> StepResult:
        self.now = max(self.now, ended)
        return self._runner.run(step)

    def utilisation(self, begin: float, end: float) -> float:
        """The share of this time in which stages computed, the mean of all."""
        busy = sum(max(0.0, min(b, end) - max(a, begin)) for spans in self.spans for a, b in spans)
        return busy / (len(self.spans) * (end - begin))
