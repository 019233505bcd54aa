"""The steps in which Kubernetes replaces the pods of a Deployment, and how many serve during each.

Pure arithmetic: that of the Deployment controller (RollingUpdate, Recreate) where each pod becomes ready
before the next step. Knows no manifest.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Step:
    """`stops` old pods end and `starts` new ones load; `serving` pods serve until the new ones are ready."""

    stops: int
    starts: int
    serving: int


def rolling(old: int, wanted: int, *, surge: int, unavailable: int) -> list[Step]:
    """From `old` serving pods to `wanted` new ones: at most `surge` more than wanted, and at most
    `unavailable` fewer serving.
    """
    steps: list[Step] = []
    new = 0
    while old or new < wanted:
        stops = starts = 0
        while True:
            start = min(wanted + surge - (old - stops + new + starts), wanted - new - starts)
            stop = min(old - stops, old - stops + new - (wanted - unavailable))
            if start <= 0 and stop <= 0:
                break
            starts, stops = starts + max(0, start), stops + max(0, stop)
        if not (starts or stops):
            return steps  # neither surge nor unavailable: the API refuses such a strategy
        old, serving = old - stops, old - stops + new
        steps.append(Step(stops=stops, starts=starts, serving=serving))
        new += starts
    return steps


def recreated(old: int, wanted: int) -> list[Step]:
    """All old pods end first."""
    return [Step(stops=old, starts=wanted, serving=0)]


def described(steps: list[Step], wanted: int) -> list[str]:
    """Numbered sentences; equal steps are combined."""
    lines, first = [], 0
    while first < len(steps):
        last = first
        while last + 1 < len(steps) and steps[last + 1] == steps[first]:
            last += 1
        number = f"{first + 1}." if first == last else f"{first + 1} to {last + 1}."
        lines.append(f"{number} {_sentence(steps[first], wanted)}{' each time' if last > first else ''}")
        first = last + 1
    return lines


def _sentence(step: Step, wanted: int) -> str:
    parts = [f"stop {step.stops} old"] if step.stops else []
    parts += [f"start {step.starts} new"] if step.starts else []
    return f"{' and '.join(parts)}: {step.serving} of {wanted} serve meanwhile"
