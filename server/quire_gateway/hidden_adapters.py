"""LoRA adapters that no request reaches by their names, because another object has the name: a line of the
log when there is one, and a metric as long as there is. Changes nothing of what is routed.

Two LLMDeployments may name an adapter alike, in one namespace or in two, and a route or an LLMDeployment may
have the name of an adapter. The gateway writes no status of LLMDeployments, so this is where it says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire_gateway.replicas import ReplicaTable
from quire_gateway.routing_state import RoutingState
from quire_gateway.routing_table import RoutingTable

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0


class HiddenAdapter(NamedTuple):
    """``deployment``: whose adapter it is; ``taken_by``: what has the name, by kind, namespace and name."""

    deployment: str
    adapter: str
    taken_by: str


def hidden_adapters(table: RoutingTable, replicas: ReplicaTable) -> set[HiddenAdapter]:
    """Those of LLMDeployments that the gateway serves. A route with the name reaches it at its targets."""
    found = set[HiddenAdapter]()
    known = replicas.places()
    for name, owners in table.adapters.items():
        if (route := table.routes.get(name)) is not None:
            reached = {(route.namespace, one) for one in (*route.deployments, *route.shadows)}
            taken_by = f"LLMRoute {route.namespace}/{route.name}"
        elif (place := replicas.place(name, owners)) is not None:
            reached, taken_by = {place}, f"LLMDeployment {'/'.join(place)}"
        else:
            continue
        found |= {HiddenAdapter("/".join(one), name, taken_by) for one in owners if one in known - reached}
    return found


class HiddenAdapters(Collector):
    """Looks for them now and then."""

    def __init__(self, state: RoutingState, replicas: ReplicaTable) -> None:
        self._state, self._replicas = state, replicas
        self._known = set[HiddenAdapter]()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)  # objects and slices come one by one: not after each of them

    def look(self) -> None:
        """Log those that are new."""
        found = hidden_adapters(self._state.table, self._replicas)
        for one in sorted(found - self._known):
            logger.warning(
                "no request reaches an adapter by its name: rename it, or what has the name",
                extra=one._asdict(),
            )
        self._known = found

    def collect(self) -> Iterable[Metric]:
        """One series for each."""
        gauge = GaugeMetricFamily(
            "gateway_hidden_adapters",
            "Adapters that no request reaches by their names, because another object has the name.",
            labels=["deployment", "adapter", "taken_by"],
        )
        for one in sorted(hidden_adapters(self._state.table, self._replicas)):
            gauge.add_metric(list(one), 1)
        return [gauge]
