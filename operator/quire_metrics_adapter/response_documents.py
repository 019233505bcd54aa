"""Response documents: MetricValueLists in both versions of the API, and a Status for a refusal.

Pure. Source: k8s.io/metrics/pkg/apis/custom_metrics/{v1beta1,v1beta2}/types.go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from quire_metrics_adapter.discovery import GROUP
from quire_metrics_adapter.errors import RefusedError
from quire_metrics_adapter.load import quantity
from quire_operator import names

Document = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """The value of a metric for one LLMDeployment. `at`: when its oldest sample was taken (UTC)."""

    namespace: str
    name: str
    value: float
    at: datetime


def metric_values(version: str, metric: str, items: Sequence[Item]) -> Document:
    """A MetricValueList of `version`."""
    return {
        "kind": "MetricValueList",
        "apiVersion": f"{GROUP}/{version}",
        "metadata": {},
        "items": [_item(version, metric, item) for item in items],
    }


def _item(version: str, metric: str, item: Item) -> Document:
    named = (
        {"metricName": metric, "selector": None}
        if version == "v1beta1"
        else {"metric": {"name": metric, "selector": None}}
    )
    return {
        "describedObject": {
            "kind": names.KIND,
            "namespace": item.namespace,
            "name": item.name,
            "apiVersion": names.API_VERSION,
        },
        **named,
        "timestamp": item.at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "value": quantity(item.value),
    }


def status(refusal: RefusedError) -> Document:
    """The Kubernetes Status of an error."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": refusal.message,
        "reason": refusal.reason,
        "code": refusal.code,
    }
