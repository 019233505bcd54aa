"""A strict parser of the Prometheus text format for the few load metrics of a pod.

Input is untrusted bytes from the network: a metric with any value that is not a plain number within its
bounds is dropped, so that it never enters a sum. Knows no pod and no clock. Source:
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire_metrics_adapter.errors import HostileAnswerError
from quire_metrics_adapter.load_metrics import METRICS, LoadMetric
from quire_operator import names

MAX_BYTES = 1 << 20
MAX_SERIES = 64  # series of one name: no pod has more GPUs

_OURS = tuple(metric.source for metric in METRICS.values())
_NUMBER = re.compile(r"\+?\d{1,20}(\.\d{0,40})?([eE][+-]?\d{1,3})?", re.ASCII)


def parse(raw: bytes, role: str = names.ROLE_LEADER) -> dict[str, float]:
    """Metric name -> the value of a pod in `role`, without metrics that are missing or invalid.

    Raises HostileAnswerError for more than MAX_BYTES.
    """
    if len(raw) > MAX_BYTES:
        raise HostileAnswerError(f"/metrics is longer than {MAX_BYTES} bytes")
    series: dict[str, list[str]] = {metric.source: [] for metric in METRICS.values()}
    # Not splitlines(), which would also split at characters that label values may contain.
    for line in raw.decode("utf-8", errors="replace").split("\n"):
        if not line.startswith(_OURS):  # as nearly all lines
            continue
        name = re.split(r"[{ \t]", line, maxsplit=1)[0]
        if name in series:
            series[name].append(line)
    return _values(series, role)


def _values(series: Mapping[str, list[str]], role: str) -> dict[str, float]:
    values = {}
    for metric in METRICS.values():
        value = _value(metric, series[metric.source]) if metric.role == role else None
        if value is not None:
            values[metric.name] = value
    return values


def _value(metric: LoadMetric, lines: list[str]) -> float | None:
    if not 1 <= len(lines) <= MAX_SERIES:
        return None
    numbers = []
    for line in lines:
        rest = line.rpartition("}")[2] if "{" in line else line[len(metric.source) :]
        words = rest.split()  # the value, and perhaps a timestamp
        if not 1 <= len(words) <= 2 or not _NUMBER.fullmatch(words[0]):
            return None
        number = float(words[0])
        if number > metric.highest:
            return None
        numbers.append(number)
    return sum(numbers) / len(numbers) if metric.is_share else sum(numbers)
