"""Which gateways run, and which generation of each object they use: each has a Lease and says it there.

A Lease counts for as long as it is renewed, by this process's own clock, so that clocks that differ do no
harm. The gateway whose name is first writes what all would write the same; no election is needed for that.
Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

LABEL_ROLE = "serving.quire.dev/role"
ROLE = "gateway"
ANNOTATION_APPLIED = "serving.quire.dev/applied"
ANNOTATION_ROLLOUTS = "serving.quire.dev/rollouts"
DURATION_SECONDS = 15

Body = Mapping[str, Any]
Generations = Mapping[str, int]  # by an object's UID


class GatewayLeases:
    """The Leases of all gateways. ``changed`` is called after each change."""

    def __init__(self, changed: Callable[[], None], clock: Callable[[], float]) -> None:
        self._changed = changed
        self._clock = clock
        self._leases: dict[str, tuple[object, float, Generations]] = {}  # renewal, since when, generations
        self._rollouts: dict[str, Any] = {}  # what each says that it has seen of rollouts
        self._num_live, self._counted_until = 0, float("-inf")

    def live(self) -> dict[str, Generations]:
        """By the name of each gateway that runs what it uses."""
        now = self._clock()
        return {
            name: generations
            for name, (_, since, generations) in self._leases.items()
            if now - since < DURATION_SECONDS
        }

    def num_live(self) -> int:
        """How many gateways run."""
        if (now := self._clock()) >= self._counted_until:
            ends = [since + DURATION_SECONDS for _, since, _ in self._leases.values()]
            live = [end for end in ends if now < end]
            self._num_live, self._counted_until = len(live), min(live, default=float("inf"))
        return self._num_live

    def rollouts(self) -> list[Any]:
        """What each gateway that runs says that it has seen of rollouts, as it wrote it."""
        return [self._rollouts[name] for name in self.live() if name in self._rollouts]

    def replace(self, bodies: Iterable[Body], namespace: str) -> None:
        """These are all Leases."""
        self._counted_until = float("-inf")
        known, self._leases, self._rollouts = self._leases, {}, {}
        for body in bodies:
            self._put(body, known)
        self._changed()

    def put(self, body: Body) -> None:
        """A Lease is new or was renewed."""
        self._put(body, self._leases)
        self._changed()

    def remove(self, body: Body) -> None:
        """A gateway has ended."""
        self._counted_until = float("-inf")
        self._leases.pop(str(body["metadata"]["name"]), None)
        self._rollouts.pop(str(body["metadata"]["name"]), None)
        self._changed()

    def _put(self, body: Body, known: Mapping[str, tuple[object, float, Generations]]) -> None:
        name, renewed = str(body["metadata"]["name"]), (body.get("spec") or {}).get("renewTime")
        before = known.get(name)
        since = before[1] if before is not None and before[0] == renewed else self._clock()
        self._counted_until = float("-inf")
        self._leases[name] = (renewed, since, _generations(body))
        self._rollouts[name] = _said(body, ANNOTATION_ROLLOUTS)


def lease(
    name: str, generations: Generations, renewed: str, rollouts: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The Lease of a gateway. ``rollouts``: what it has seen of them."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": name,
            "labels": {LABEL_ROLE: ROLE},
            "annotations": {
                ANNOTATION_APPLIED: json.dumps(generations, separators=(",", ":")),
                ANNOTATION_ROLLOUTS: json.dumps(dict(rollouts), separators=(",", ":")),
            },
        },
        "spec": {"holderIdentity": name, "leaseDurationSeconds": DURATION_SECONDS, "renewTime": renewed},
    }


def _generations(body: Body) -> Generations:
    try:
        found = _said(body, ANNOTATION_APPLIED)
        return {str(uid): int(generation) for uid, generation in found.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _said(body: Body, annotation: str) -> Any:
    """The JSON of an annotation, an empty object where it is none."""
    try:
        return json.loads((body["metadata"].get("annotations") or {})[annotation])
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
