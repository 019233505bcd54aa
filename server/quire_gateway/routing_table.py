"""Which LLMRoute has which name of a model, and which LLMClient which key: decided from all of them at once.

The oldest object has what several ask for. A route that asks for a name of an older one is not accepted, with
none of its names, so that it is served as it stands or not at all. Pure: the same objects give the same table
in every gateway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_gateway import llm_client, llm_external_backend, llm_route
from quire_gateway.llm_client import LLMClient
from quire_gateway.llm_external_backend import LLMExternalBackend
from quire_gateway.llm_route import LLMRoute, ObjectError

Body = Mapping[str, Any]
Place = tuple[str, str]  # namespace and name


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """What was decided. ``rejected``: by the objects' UIDs a reason and a message."""

    routes: Mapping[str, LLMRoute] = field(default_factory=dict)  # by the name of a model
    clients: Mapping[str, LLMClient] = field(default_factory=dict)  # by the digest of a key
    has_clients: bool = False
    externals: Mapping[Place, LLMExternalBackend] = field(default_factory=dict)
    served_names: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)  # of LLMDeployments
    #: By the name of a LoRA adapter the LLMDeployments that have it, the oldest first.
    adapters: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)
    rejected: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def resolve(
    routes: Iterable[Body],
    clients: Iterable[Body],
    deployments: Iterable[Body],
    externals: Iterable[Body] = (),
) -> RoutingTable:
    """The table of all objects."""
    rejected: dict[str, tuple[str, str]] = {}
    bodies, models = list(clients), _readable(deployments, rejected)
    return RoutingTable(
        routes=_routes(routes, rejected),
        clients=_clients(bodies, rejected),
        has_clients=bool(bodies),
        externals=_externals(externals, rejected),
        served_names={place_of(body): _served_names(body) for body in models},
        adapters=_adapters(models),
        rejected=rejected,
    )


def _routes(bodies: Iterable[Body], rejected: dict[str, tuple[str, str]]) -> dict[str, LLMRoute]:
    taken: dict[str, LLMRoute] = {}
    for body in sorted(bodies, key=_age):
        try:
            route = llm_route.parse(body)
        except ObjectError as error:
            rejected[uid_of(body)] = ("Unreadable", str(error))
            continue
        conflicts = [
            f"{model!r} of LLMRoute {_name(taken[model])}" for model in route.models if model in taken
        ]
        if conflicts:
            message = (
                f"An older one has a name: {', '.join(conflicts)}. Choose other names, or delete that one."
            )
            rejected[route.uid] = ("NameConflict", message)
        else:
            taken.update(dict.fromkeys(route.models, route))
    return taken


def _clients(bodies: Iterable[Body], rejected: dict[str, tuple[str, str]]) -> dict[str, LLMClient]:
    taken: dict[str, LLMClient] = {}
    for body in sorted(bodies, key=_age):
        try:
            client = llm_client.parse(body)
        except ObjectError as error:
            rejected[uid_of(body)] = ("Unreadable", str(error))
            continue
        conflicts = sorted({_name(taken[one]) for one in client.key_hashes if one in taken})
        if conflicts:
            message = f"An older LLMClient has the same key: {', '.join(conflicts)}. Give each its own."
            rejected[client.uid] = ("KeyConflict", message)
        else:
            taken.update(dict.fromkeys(client.key_hashes, client))
    return taken


def _externals(
    bodies: Iterable[Body], rejected: dict[str, tuple[str, str]]
) -> dict[Place, LLMExternalBackend]:
    found = {}
    for body in bodies:
        try:
            found[place_of(body)] = llm_external_backend.parse(body)
        except ObjectError as error:
            rejected[uid_of(body)] = ("Unreadable", str(error))
    return found


def _readable(deployments: Iterable[Body], rejected: dict[str, tuple[str, str]]) -> list[Body]:
    """Those whose names can be read: one that another version of the CRD took is not in the way of others."""
    found = []
    for body in deployments:
        try:
            _adapters([body])
            if not all(isinstance(name, str) for name in _served_names(body)):
                raise TypeError("a name is no text")
        except (TypeError, ValueError, AttributeError) as error:
            rejected[uid_of(body)] = ("Unreadable", f"the spec cannot be read: {error!r}")
            continue
        found.append(body)
    return found


def _served_names(body: Body) -> tuple[str, ...]:
    """The names that an LLMDeployment's servers answer to."""
    model = (body.get("spec") or {}).get("model") or {}
    return (model.get("servedName") or place_of(body)[1], *(model.get("aliases") or ()))


def _adapters(bodies: Iterable[Body]) -> dict[str, tuple[Place, ...]]:
    """By name. An LLMDeployment's own names are of its model."""
    found: dict[str, list[Place]] = defaultdict(list)
    for body in sorted(bodies, key=_age):
        place = place_of(body)
        listed = (body.get("spec") or {}).get("adapters") or ()
        names = dict.fromkeys(str(one.get("name")) for one in listed)
        for name in names.keys() - {place[1], *_served_names(body)}:
            found[name].append(place)
    return {name: tuple(places) for name, places in found.items()}


def _name(one: LLMRoute | LLMClient) -> str:
    return f"{one.namespace}/{one.name}"


def place_of(body: Body) -> Place:
    """The namespace and the name of an object."""
    return str(body["metadata"]["namespace"]), str(body["metadata"]["name"])


def uid_of(body: Body) -> str:
    """The UID of an object."""
    return str(body["metadata"].get("uid"))


def _age(body: Body) -> tuple[str, Place]:
    return str(body["metadata"].get("creationTimestamp")), place_of(body)
