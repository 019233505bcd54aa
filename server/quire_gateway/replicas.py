"""The replicas of each model, from its Service's EndpointSlices: pods that are ready and not terminating.

A replica is its pod, by UID: its counts stay while slices are split, merged and written again, and end with
the pod. A pod that leaves keeps the answers it has begun. Each model has policies of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from quire_gateway.llm_route import DEFAULT_STRATEGY, Strategy
from quire_gateway.outlier_detection import OutlierDetection
from quire_gateway.replica import AdapterState, Endpoint, Replica
from quire_gateway.retry_budget import RetryBudget
from quire_gateway.routing.router import Router

LABEL_MODEL = "serving.quire.dev/name"
LABEL_SERVICE = "kubernetes.io/service-name"
PORT_NAME = "http"
HEALTH_PORT_NAME = "health"
_MAX_ROUTERS = 8  # of a model; the one that was not used for longest is made anew

NewRouter = Callable[[Strategy], Router]


class Model:
    """The replicas of one LLMDeployment, and the policies that choose among them, each made when it is asked
    for.
    """

    def __init__(self, namespace: str, name: str, clock: Callable[[], float], new_router: NewRouter) -> None:
        self.place = namespace, name
        self.name = name
        self.audience = f"{namespace}/{name}"  # of what is signed for its replicas
        self._clock = clock
        self._new_router = new_router
        self._routers: OrderedDict[Strategy, Router] = OrderedDict()
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
        for router in self._routers.values():
            router.keep(self.replicas)

    @property
    def context_length(self) -> int | None:
        """Tokens of the longest context of a replica; None while that of one is not known."""
        lengths = [one.context_length for one in self.replicas.values()]
        return None if None in lengths else max(filter(None, lengths), default=None)

    def router(self, strategy: Strategy = DEFAULT_STRATEGY) -> Router:
        """The policy of this strategy. What one learns another one does not know."""
        if strategy not in self._routers:
            if len(self._routers) == _MAX_ROUTERS:
                self._routers.popitem(last=False)
            self._routers[strategy] = self._new_router(strategy)
            self._routers[strategy].keep(self.replicas)
        self._routers.move_to_end(strategy)
        return self._routers[strategy]

    def learn(self, uid: str, digests: Sequence[int]) -> None:
        """Another gateway sent a prompt of these blocks to this pod."""
        self.router()  # knows from the start what others say
        for router in self._routers.values():
            router.learn(uid, digests)

    def candidates(self, tried: Iterable[str], adapter: str = "") -> list[Replica]:
        """The replicas that a request may go to, those left out that it has tried. Where all others are
        ejected one of them is better than none. ``adapter``: they have it, or where none has, they do not
        say that they lack it.
        """
        others = [one for uid, one in self.replicas.items() if uid not in tried]
        if adapter:
            states = [(one.adapter(adapter, self._clock()), one) for one in others]
            others = [one for state, one in states if state is AdapterState.READY]
            others = others or [one for state, one in states if state is AdapterState.UNKNOWN]
        return [one for one in others if self.outliers.takes_requests(one.endpoint.uid)] or others

    def is_loading(self, adapter: str) -> bool:
        """Whether no replica can be asked for an adapter, and one will have it."""
        states = {one.adapter(adapter, self._clock()) for one in self.replicas.values() if adapter}
        return AdapterState.LOADING in states and states.isdisjoint(
            (AdapterState.READY, AdapterState.UNKNOWN)
        )

    def keeper(self, hint: str) -> Replica | None:
        """The replica with this hint."""
        return next((one for one in self.replicas.values() if one.endpoint.hint == hint), None)


class ReplicaTable:
    """All models of the watched namespaces. ``health_port``: of replicas whose Service names none.
    ``new_router``: makes the policies of a model.
    """

    def __init__(
        self,
        namespaces: Sequence[str],
        health_port: int,
        clock: Callable[[], float],
        new_router: NewRouter,
    ) -> None:
        self._namespaces = namespaces
        self._health_port = health_port
        self._clock = clock
        self._new_router = new_router
        self._slices: dict[tuple[str, str], dict[str, dict[str, Endpoint]]] = {}  # by model, then by slice
        self._models: dict[tuple[str, str], Model] = {}

    def at(self, place: tuple[str, str]) -> Model | None:
        """The model of the LLMDeployment with this namespace and name."""
        return self._models.get(place)

    def without_replicas(self, place: tuple[str, str]) -> Model:
        """An LLMDeployment that has none, and may not exist."""
        return Model(*place, self._clock, self._new_router)

    def place(self, name: str, owners: Sequence[tuple[str, str]] = ()) -> tuple[str, str] | None:
        """The namespace and the name of the LLMDeployment that is served under this name. ``owners``: those
        that have an adapter of this name. That of the first namespace is served; in a namespace the
        LLMDeployment of this name, then the first of the owners.
        """
        places = (
            place
            for namespace in self._namespaces
            for place in ((namespace, name), *(one for one in owners if one[0] == namespace))
        )
        return next((place for place in places if place in self._models), None)

    def places(self) -> set[tuple[str, str]]:
        """Of every LLMDeployment."""
        return set(self._models)

    def ready_places(self) -> set[tuple[str, str]]:
        """Of those that have a ready replica."""
        return {place for place, model in self._models.items() if model.replicas}

    def models(self) -> list[Model]:
        """Those that can be asked for, by name."""
        names = sorted({name for _, name in self._models})
        return [self._models[place] for name in names if (place := self.place(name)) is not None]

    def all_models(self) -> Iterable[Model]:
        """Those of every namespace."""
        return self._models.values()

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
            self._models[place] = Model(*place, self._clock, self._new_router)
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
