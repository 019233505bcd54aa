"""How an LLMRoute moves conversations to another LLMDeployment: by steps, and back where that one is worse.

One gateway writes the step into the status of the route, and all gateways route by it. What they have seen of
both sides comes with their Leases. A step ends by time; where the new deployment fails more often than is
allowed, or takes longer to begin its answers, its share is nothing until the rollout is changed. Pure.
"""

from __future__ import annotations

import calendar
import functools
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from quire_gateway.llm_route import Rollout

PROGRESSING, COMPLETED, ABORTED = "Progressing", "Completed", "Aborted"
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_DIGEST_LENGTH = 12


class Counts(NamedTuple):
    """What was seen of one side in a step. ``seconds``: to the first bytes of ``num_begun`` answers."""

    requests: int = 0
    errors: int = 0
    num_begun: int = 0
    seconds: float = 0.0

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(
            self.requests + other.requests,
            self.errors + other.errors,
            self.num_begun + other.num_begun,
            self.seconds + other.seconds,
        )


class Sides(NamedTuple):
    """Of the deployments that the route's rules name, and of the one that the rollout goes to."""

    stable: Counts = Counts()
    candidate: Counts = Counts()


class StepKey(NamedTuple):
    """A step of a rollout; another spec has other steps."""

    digest: str
    step: int


@dataclass(frozen=True, slots=True)
class Arm:
    """The side that a request was on."""

    uid: str  # of the route
    key: StepKey
    is_candidate: bool


@functools.lru_cache(maxsize=256)  # each request of a route that rolls out asks for it
def digest_of(rollout: Rollout) -> str:
    """Changes with each change of the rollout's spec."""
    text = json.dumps(asdict(rollout), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]


def current(rollout: Rollout, stored: Mapping[str, Any] | None) -> tuple[StepKey, int]:
    """The step that stands in the status, and the share in percent that it gives to the new deployment."""
    digest = digest_of(rollout)
    if not stored or stored.get("digest") != digest:
        return StepKey(digest, 0), 0  # it has not begun
    return StepKey(digest, int(stored.get("step", 0))), int(stored.get("currentWeight", 0))


def advance(
    rollout: Rollout, stored: Mapping[str, Any] | None, seen: Sides, now: float, *, is_resolved: bool
) -> dict[str, Any]:
    """The status of the rollout now. ``seen``: in the step that is stored; ``now``: seconds since 1970;
    ``is_resolved``: whether the deployment is there.
    """
    digest = digest_of(rollout)
    if not stored or stored.get("digest") != digest:
        return _status(rollout, digest, 0, PROGRESSING, now, "The first step begins.", begins=is_resolved)
    if stored.get("phase") != PROGRESSING:
        return dict(stored)
    step = min(int(stored.get("step", 0)), len(rollout.steps) - 1)
    if not int(stored.get("currentWeight", 0)):
        if not is_resolved:
            return dict(stored)
        return _status(rollout, digest, step, PROGRESSING, now, "The first step begins.")
    if why := _why_abort(rollout, seen):
        return {**_status(rollout, digest, step, ABORTED, now, why), "currentWeight": 0}
    if now - _seconds(stored.get("since")) < rollout.steps[step].pause_seconds:
        return dict(stored)
    if step + 1 == len(rollout.steps):
        message = f"{rollout.deployment} has {rollout.steps[step].weight} % of the conversations."
        return _status(rollout, digest, step, COMPLETED, now, message)
    message = f"Step {step + 2} of {len(rollout.steps)}."
    return _status(rollout, digest, step + 1, PROGRESSING, now, message)


def _status(
    rollout: Rollout, digest: str, step: int, phase: str, now: float, message: str, *, begins: bool = True
) -> dict[str, Any]:
    waits = f"There is no LLMDeployment {rollout.deployment} yet."
    return {
        "digest": digest,
        "deployment": rollout.deployment,
        "step": step,
        "currentWeight": rollout.steps[step].weight if begins else 0,
        "phase": phase,
        "since": time.strftime(_TIME, time.gmtime(now)),
        "message": message if begins else waits,
    }


def _why_abort(rollout: Rollout, seen: Sides) -> str:
    """Empty where there is no reason, or too little was seen."""
    limits, new, old = rollout.abort_on, seen.candidate, seen.stable
    if new.requests < limits.min_requests:
        return ""
    percent = 100 * new.errors / new.requests
    if limits.error_percent is not None and percent > limits.error_percent:
        return (
            f"{percent:.1f} % of {new.requests} requests to {rollout.deployment} failed, more than "
            f"{limits.error_percent} %. Change spec.rollout to try again."
        )
    enough = min(new.num_begun, old.num_begun) >= limits.min_requests
    if limits.ttft_percent is None or not enough:
        return ""
    times = [one.seconds / one.num_begun for one in (new, old)]
    if times[0] > times[1] * limits.ttft_percent / 100:
        return (
            f"Answers of {rollout.deployment} begin after {times[0]:.3f} s, those of the others after "
            f"{times[1]:.3f} s: more than {limits.ttft_percent} %. Change spec.rollout to try again."
        )
    return ""


def _seconds(text: object) -> float:
    try:
        return float(calendar.timegm(time.strptime(str(text), _TIME)))
    except ValueError:
        return 0.0


class RolloutCounts:
    """What one gateway has seen of the step of each route that rolls out."""

    def __init__(self) -> None:
        self._by_route: dict[str, tuple[StepKey, Sides]] = {}

    def ended(self, arm: Arm, *, is_error: bool, first_byte: float | None) -> None:
        """A request of a step is over."""
        key, sides = self._by_route.get(arm.uid, (arm.key, Sides()))
        if key != arm.key:
            if key.digest == arm.key.digest and key.step > arm.key.step:
                return  # it began in a step that is over
            sides = Sides()
        one = Counts(1, int(is_error), int(first_byte is not None), first_byte or 0.0)
        stable, candidate = sides
        new = Sides(stable, candidate.plus(one)) if arm.is_candidate else Sides(stable.plus(one), candidate)
        self._by_route[arm.uid] = (arm.key, new)

    def keep(self, uids: set[str]) -> None:
        """These are the routes that roll out."""
        self._by_route = {uid: one for uid, one in self._by_route.items() if uid in uids}

    def document(self) -> dict[str, Any]:
        """For a Lease: by route the step, and the counts of both sides."""
        return {uid: [*key, *map(list, sides)] for uid, (key, sides) in self._by_route.items()}


def counts_of(document: object, uid: str, key: StepKey) -> Sides:
    """What the Lease of a gateway says of a step; nothing where it says it of another one, or cannot be
    read.
    """
    said = document.get(uid) if isinstance(document, dict) else None
    if not isinstance(said, list):
        return Sides()
    try:
        digest, step, stable, candidate = said
        if StepKey(str(digest), int(step)) != key:
            return Sides()
        return Sides(*(Counts(int(a), int(b), int(c), float(d)) for a, b, c, d in (stable, candidate)))
    except (TypeError, ValueError):
        return Sides()
