"""The policies by the names that a route has for them."""

from __future__ import annotations

import random
from collections.abc import Callable

from quire_gateway.llm_route import Strategy
from quire_gateway.routing.by_load import LeastLoad, PowerOfTwo, Random, RoundRobin
from quire_gateway.routing.prefix import Prefix, Publish
from quire_gateway.routing.router import Router
from quire_gateway.routing.session import Session


def router_for(
    strategy: Strategy, chance: random.Random, seed: int, *, publish: Publish | None = None
) -> Router:
    """A new policy for one model. ``seed``: the install's own, the same on all of its gateways. ``publish``:
    where the other gateways are sent what Prefix has chosen.
    """
    by_name: dict[str, Callable[[], Router]] = {
        "LeastLoad": lambda: LeastLoad(chance),
        "PowerOfTwo": lambda: PowerOfTwo(chance),
        "Prefix": lambda: Prefix(chance, seed, publish),
        "Random": lambda: Random(chance),
        "RoundRobin": RoundRobin,
        "Session": lambda: Session(chance, seed, strategy.session_header),
    }
    return by_name[strategy.name]()
