"""The gateway's Prometheus metrics: requests by model and how they ended, what was chosen, what was retried.

Labels have the names of models that exist, and no text of a client's. Nothing is global.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire_gateway.gone_series import GoneSeries
from quire_gateway.replicas import ReplicaTable
from quire_gateway.rollout import RolloutCounts
from quire_gateway.tallies import Distribution, Series, Tally
from quire_gateway.usage import Usage

_TTFT = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """All metrics of one gateway."""

    def __init__(self, table: ReplicaTable, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry = CollectorRegistry()
        self.rollouts = RolloutCounts()
        tally = partial(Tally, registry=registry)
        self._requests = tally(
            "gateway_requests", "Requests by how they ended.", ["model", "client", "status"]
        )
        self._picks = tally("gateway_picks", "Replicas chosen, by reason.", ["model", "reason"])
        self._predictions = tally(
            "gateway_prefix_predictions",
            "Answers by whether a part of the prompt was expected in the replica's cache, and was there.",
            ["model", "predicted", "actual"],
        )
        self._retries = tally("gateway_retries", "Second and further attempts, by why.", ["model", "reason"])
        self._tokens = tally(
            "gateway_tokens",
            "Tokens of answers that say what they took; cached ones are of the prompt's.",
            ["model", "client", "type"],
        )
        self._resumed = tally(
            "gateway_resumed_streams",
            "Streams that another replica was asked to go on with, each time.",
            ["model"],
        )
        self._cache_hits = tally("gateway_response_cache_hits", "Answers that were given again.", ["model"])
        self._fallbacks = tally(
            "gateway_fallbacks",
            "Requests that no replica of their target answered, by what was tried next.",
            ["model", "step"],
        )
        self._classifications = tally(
            "gateway_classifications", "Questions to classifiers, by how they ended.", ["model", "outcome"]
        )
        self._shadow = tally(
            "gateway_shadow_requests",
            "Copies of requests for a deployment that clients do not see, by how they ended.",
            ["model", "outcome"],
        )
        self._refused = tally("gateway_connections_refused", "Connections that there was no room for.")
        self._in_flight = tally(
            "gateway_requests_in_flight", "Requests that are relayed.", family=GaugeMetricFamily
        )
        self._durations = _Durations(registry)
        self._limit_store: _LimitStore | None = None
        registry.register(_Replicas(table, clock))
        by_model = (self._picks, self._predictions, self._retries, self._resumed, self._cache_hits)
        others = (self._fallbacks, self._classifications, self._shadow, *self._durations.all())
        self._gone = GoneSeries((self._requests, self._tokens, *by_model, *others), clock)

    def begun(self) -> None:
        """A request is relayed."""
        self._in_flight.add()

    def ended(self, model: str, client: str, status: str, seconds: float, first_byte: float | None) -> None:
        """It is over."""
        self._in_flight.add(number=-1)
        self._requests.add(model, client, status)
        if first_byte is not None:
            self._durations.ttft.observe(first_byte, model)
            self._durations.seconds.observe(seconds, model)

    def picked(self, model: str, reason: str) -> None:
        """A replica was chosen."""
        self._picks.add(model, reason)

    def predicted(self, model: str, hit: bool, actual: bool | None) -> None:
        """A replica was expected to have a part of a prompt cached, or not; None: it does not say."""
        labels = {True: "hit", False: "miss", None: "unknown"}
        self._predictions.add(model, labels[hit], labels[actual])

    def retried(self, model: str, reason: str, *, is_resumed: bool) -> None:
        """Another replica is asked, because the last one failed for this reason; ``is_resumed``: it goes on
        with a stream.
        """
        self._retries.add(model, reason)
        if is_resumed:
            self._resumed.add(model)

    def took(self, model: str, client: str, usage: Usage) -> None:
        """A request took these tokens."""
        numbers = {"prompt": usage.prompt, "completion": usage.completion, "cached": usage.cached or 0}
        for kind, number in numbers.items():
            self._tokens.add(model, client, kind, number=number)

    def cache_hit(self, model: str) -> None:
        """An answer is given again."""
        self._cache_hits.add(model)

    def fell_back(self, model: str, step: str) -> None:
        """No replica of the target answered, and this is tried."""
        self._fallbacks.add(model, step)

    def classified(self, model: str, outcome: str) -> None:
        """A classifier was asked."""
        self._classifications.add(model, outcome)

    def shadowed(self, model: str, outcome: str) -> None:
        """A copy of a request has ended, or was not sent for lack of room."""
        self._shadow.add(model, outcome)

    def held(self, model: str, change: int) -> None:
        """One request more, or less, waits for a model without pods."""
        self._durations.hold_seconds.begin(model, "timeout")
        self._durations.held.add(model, number=change)

    def hold_ended(self, model: str, outcome: str, seconds: float) -> None:
        """A request was released, its time was over, or its client is gone."""
        self._durations.hold_seconds.observe(seconds, model, outcome)

    def limit_store(self, *, is_up: bool) -> None:
        """There is a limit store, which answers or not."""
        if self._limit_store is None:
            self._limit_store = _LimitStore(self.registry)
        self._limit_store.is_up.set(is_up)

    def limit_store_lost(self) -> None:
        """It answered before, or was not asked yet, and does not answer now."""
        if self._limit_store is not None:
            self._limit_store.losses.inc()

    def limit_store_failed(self, reason: str) -> None:
        """It did not answer, for this reason."""
        if self._limit_store is not None:
            self._limit_store.errors.labels(reason).inc()

    def connection_refused(self) -> None:
        """There was no room for a connection."""
        self._refused.add()

    def exposition(self, models: Collection[str], clients: Collection[str]) -> tuple[bytes, str]:
        """The text of /metrics and its type, without the series of names that are none of these any more."""
        self._gone.drop({"model": models, "client": clients})
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4


class _LimitStore:
    """Of gateways that have one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.is_up = Gauge("gateway_limit_store_up", "Whether the limit store answers.", registry=registry)
        self.losses = Counter(
            "gateway_limit_store_losses", "How often the limit store was lost.", registry=registry
        )
        self.errors = Counter(
            "gateway_limit_store_errors",
            "Exchanges with the limit store that failed.",
            ["reason"],
            registry=registry,
        )


class _Durations:
    """How long requests take, and how many wait for a model that is started."""

    def __init__(self, registry: CollectorRegistry) -> None:
        distribution = partial(Distribution, registry=registry)
        self.ttft = distribution(
            "gateway_time_to_first_token_seconds",
            "Arrival to the first bytes of an answer.",
            ["model"],
            bounds=_TTFT,
        )
        self.seconds = distribution(
            "gateway_request_duration_seconds",
            "Arrival to the end of an answer.",
            ["model"],
            bounds=_SECONDS,
        )
        self.held = Tally(
            "gateway_held_requests",
            "Requests that wait for a model without pods.",
            ["model"],
            registry=registry,
            family=GaugeMetricFamily,
        )
        self.hold_seconds = distribution(
            "gateway_hold_duration_seconds",
            "How long requests have waited for a model without pods, by how that ended.",
            ["model", "outcome"],
            bounds=_SECONDS,
        )

    def all(self) -> tuple[Series, ...]:
        """Each."""
        return self.ttft, self.seconds, self.held, self.hold_seconds


class _Replicas(Collector):
    """What the table has, read when it is asked for."""

    def __init__(self, table: ReplicaTable, clock: Callable[[], float]) -> None:
        self._table = table
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        """Replicas by state, their requests in flight here, and ejections."""
        replicas = GaugeMetricFamily(
            "gateway_replicas", "Ready replicas by state.", labels=["model", "state"]
        )
        in_flight = GaugeMetricFamily(
            "gateway_replica_requests_in_flight",
            "Requests of this gateway at a replica.",
            labels=["model", "replica"],
        )
        ejections = CounterMetricFamily(
            "gateway_ejections", "Replicas taken out because they failed.", labels=["model"]
        )
        for model in self._table.models():
            states = {"ready": 0, "ejected": 0, "stale": 0}
            for uid, replica in model.replicas.items():
                states["ejected" if model.outliers.is_ejected(uid) else "ready"] += 1
                states["stale"] += replica.is_stale(self._clock())
                in_flight.add_metric([model.name, uid], replica.in_flight)
            for state, number in states.items():
                replicas.add_metric([model.name, state], number)
            ejections.add_metric([model.name], model.outliers.num_ejections)
        yield from (replicas, in_flight, ejections)
