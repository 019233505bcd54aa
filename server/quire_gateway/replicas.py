"""The replicas of each model, from its Service's EndpointSlices: pods that are ready and not terminating.

A replica is its pod, by UID: its counts stay while slices are split, merged and written again, and end with
the pod. A pod that leaves keeps the answers it has begun. The load of a replica is what this gateway has in
flight there, and what others had at the last poll; old numbers are left out, and keep no request away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_gateway.outlier_detection import OutlierDetection
from quire_gateway.retry_budget import RetryBudget
from quire_http.errors import ApiError

LABEL_MODEL = "serving.quire.dev/name"
LABEL_SERVICE = "kubernetes.io/service-name"
PORT_NAME = "http"
HEALTH_PORT_NAME = "health"
STALE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a pod answers."""

    uid: str
    address: str
    port: int
    health_port: int

    @property
    def url(self) -> str:
        """The root of its API."""
        return f"http://{self._host}:{self.port}"

    @property
    def health_url(self) -> str:
        """The root of its health process."""
        return f"http://{self._host}:{self.health_port}"

    @property
    def _host(self) -> str:
        return f"[{self.address}]" if ":" in self.address else self.address


class Replica:
    """One pod that serves a model."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.in_flight = 0  # of this gateway
        self._of_others = 0  # at the last poll
        self._polled_at = float("-inf")

    def load(self, now: float) -> int:
        """Requests that wait or run there."""
        return self.in_flight + (0 if self.is_stale(now) else self._of_others)

    def is_stale(self, now: float) -> bool:
        """Whether the last poll was too long ago to count."""
        return now - self._polled_at > STALE_SECONDS

    def polled(self, total: int, now: float) -> None:
        """The replica has so many requests in all, a part of which is in flight here."""
        self._of_others, self._polled_at = max(0, total - self.in_flight), now


class Model:
    """The replicas of one LLMDeployment."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        self.replicas: dict[str, Replica] = {}
        self.outliers = OutlierDetection(clock)
        self.retries = RetryBudget()

    def update(self, endpoints: Mapping[str, Endpoint]) -> None:
        """These are all replicas that there are now."""
        known = self.replicas
        self.replicas = {}
        for uid, endpoint in endpoints.items():
            replica = known.get(uid)
            self.replicas[uid] = replica if replica and replica.endpoint == endpoint else Replica(endpoint)
        self.outliers.keep(self.replicas)

    def candidates(self, tried: Iterable[str]) -> list[Replica]:
        """The replicas that a request may go to, those left out that it has tried. Where all others are
        ejected one of them is better than none.
        """
        others = [one for uid, one in self.replicas.items() if uid not in tried]
        return [one for one in others if self.outliers.takes_requests(one.endpoint.uid)] or others


class ReplicaTable:
    """All models of the watched namespaces. ``health_port``: of replicas whose Service names none."""

    def __init__(self, namespaces: Sequence[str], health_port: int, clock: Callable[[], float]) -> None:
        self._namespaces = namespaces
        self._health_port = health_port
        self._clock = clock
        self._slices: dict[tuple[str, str], dict[str, dict[str, Endpoint]]] = {}  # by model, then by slice
        self._models: dict[tuple[str, str], Model] = {}

    def model(self, name: str) -> Model | None:
        """The model of this name."""
        places = ((namespace, name) for namespace in self._namespaces)
        return next((self._models[place] for place in places if place in self._models), None)

    def served(self, name: str) -> Model:
        """The same. Raises a 404 that names the models there are."""
        if (model := self.model(name)) is None:
            there = ", ".join(one.name for one in self.models()) or "none"
            raise ApiError(
                404,
                f"The model {name!r} is not served here; there is {there}.",
                param="model",
                code="model_not_found",
            )
        return model

    def models(self) -> list[Model]:
        """Those that can be asked for, by name."""
        names = sorted({name for _, name in self._models})
        return [model for name in names if (model := self.model(name)) is not None]

    def replicas(self) -> Iterator[Replica]:
        """Every replica."""
        for model in self._models.values():
            yield from model.replicas.values()

    def replace(self, slices: Iterable[Mapping[str, Any]], namespace: str) -> None:
        """These are all slices of a namespace."""
        places = {place for place in self._slices if place[0] == namespace}
        for known in places:
            self._slices[known] = {}
        for body in slices:
            if (place := _place(body)) is not None:
                self._slices.setdefault(place, {})[_name(body)] = self._read(body)
                places.add(place)
        for changed in places:
            self._update(changed)

    def put(self, body: Mapping[str, Any]) -> None:
        """A slice is new or has changed."""
        if (place := _place(body)) is not None:
            self._slices.setdefault(place, {})[_name(body)] = self._read(body)
            self._update(place)

    def remove(self, body: Mapping[str, Any]) -> None:
        """A slice is deleted."""
        if (place := _place(body)) is not None and place in self._slices:
            self._slices[place].pop(_name(body), None)
            self._update(place)

    def _update(self, place: tuple[str, str]) -> None:
        slices = self._slices[place]
        if not slices:
            del self._slices[place]
            self._models.pop(place, None)
            return
        if place not in self._models:
            self._models[place] = Model(place[1], self._clock)
        self._models[place].update({uid: one for each in slices.values() for uid, one in each.items()})

    def _read(self, body: Mapping[str, Any]) -> dict[str, Endpoint]:
        """The endpoints of a slice that take requests, by their pods' UIDs."""
        ports = {one.get("name"): one.get("port") for one in body.get("ports") or ()}
        if not isinstance(port := ports.get(PORT_NAME), int):
            return {}
        health_port = ports.get(HEALTH_PORT_NAME)
        if not isinstance(health_port, int):
            health_port = self._health_port
        found = {}
        for each in body.get("endpoints") or ():
            conditions = each.get("conditions") or {}
            uid, addresses = (each.get("targetRef") or {}).get("uid"), each.get("addresses")
            if uid and addresses and conditions.get("ready") and not conditions.get("terminating"):
                found[uid] = Endpoint(uid, addresses[0], port, health_port)
        return found


def _name(body: Mapping[str, Any]) -> str:
    return str(body["metadata"]["name"])


def _place(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """The namespace and the name of the LLMDeployment whose clients' Service has this slice; None for the
    slices of its other Services.
    """
    metadata = body["metadata"]
    labels = metadata.get("labels") or {}
    name = labels.get(LABEL_MODEL)
    return (str(metadata["namespace"]), name) if name and labels.get(LABEL_SERVICE) == name else None
