"""Drops the metrics of models and clients that are gone, so that there are no more series than objects.

Not at once: what was counted last is to be scraped, and an object that is made anew goes on with its series.
Knows no object, only names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from quire_gateway.tallies import Series

KEPT_SECONDS = 300.0
_LOOK_SECONDS = 30.0


class GoneSeries:
    """Those of these metrics."""

    def __init__(self, metrics: Iterable[Series], clock: Callable[[], float]) -> None:
        self._metrics = tuple(metrics)
        self._clock = clock
        self._looked_at = float("-inf")
        self._gone: dict[tuple[str, str], float] = {}  # since when, by label and value

    def drop(self, names: Mapping[str, Collection[str]]) -> None:
        """``names``: those that there are, by label. Series without a name stay."""
        now = self._clock()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        seen = {
            (label, value)
            for metric in self._metrics
            for labels in metric
            for label, value in zip(metric.names, labels, strict=True)
            if label in names
        }
        gone = {one for one in seen if one[1] and one[1] not in names[one[0]]}
        self._gone = {one: self._gone.get(one, now) for one in gone}
        dropped = {one for one, since in self._gone.items() if now - since >= KEPT_SECONDS}
        for metric in self._metrics if dropped else ():
            for labels in metric:
                if not dropped.isdisjoint(zip(metric.names, labels, strict=True)):
                    metric.remove(labels)
