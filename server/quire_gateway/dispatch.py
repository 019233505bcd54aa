"""Where a request goes: whose key it has, what the name of its model stands for, which rule and which target.

Admission in its order: the key, then the names that the key is for, the kill switch, the rules. Decides from
the routing table and the replicas as they are now, without waiting for anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from quire_gateway import arms, rollout
from quire_gateway.external_models import PREFIX, ExternalModels
from quire_gateway.llm_client import LLMClient, key_hash
from quire_gateway.llm_route import (
    DEFAULT_HOLD,
    DEFAULT_STRATEGY,
    Fallback,
    Hold,
    KillSwitch,
    LLMRoute,
    Prices,
    Rule,
    Strategy,
    Target,
)
from quire_gateway.openai.calls import Call, estimated_tokens
from quire_gateway.replica import Replica
from quire_gateway.replicas import Model, ReplicaTable
from quire_gateway.retry_budget import RetryBudget
from quire_gateway.rollout import Arm, StepKey
from quire_gateway.routing_state import RoutingState
from quire_gateway.routing_table import Place, RoutingTable, place_of
from quire_gateway.settings import Timeouts
from quire_http.errors import ApiError

DEFAULT_ATTEMPTS = 3
#: There is one endpoint, and nothing is to be learned of prompts for it.
EXTERNAL_STRATEGY = Strategy("RoundRobin")

Headers = Mapping[str, str]


class Destination(NamedTuple):
    """What a request is sent to, and how."""

    model: str  # the name that the client asked for
    replicas: Model
    served_name: str  # the name that the replicas answer to
    retries: RetryBudget
    timeouts: Timeouts
    attempts: int = DEFAULT_ATTEMPTS
    prices: Prices = Prices()
    strategy: Strategy = DEFAULT_STRATEGY
    fallbacks: tuple[Step, ...] = ()
    hold: Hold = DEFAULT_HOLD
    arm: Arm | None = None  # of the route's rollout
    cache_seconds: int = 0
    version: str = ""  # of the LLMDeployment, as far as it is known
    kill_switch: KillSwitch | None = None  # with which the fallbacks answer alone
    shadow: ShadowTarget | None = None
    hedge_seconds: float | None = None  # after which another replica is asked beside a slow one
    route: str = ""  # the LLMRoute, by its namespace and its name; empty where there is none
    adapter: str = ""  # of the replicas' model that the served name is; empty: the model itself


@dataclass(frozen=True, slots=True)
class ShadowTarget:
    """What gets copies of requests, in percent."""

    replicas: Model
    served_name: str
    timeouts: Timeouts
    percent: int
    max_in_flight: int
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """What is tried next where no replica answers. ``name``: in `x-quire-degraded` and the metrics."""

    name: str
    destination: Destination | None = None  # None: the same one
    halves_max_tokens: bool = False
    canned: str | None = None
    only_on: tuple[str, ...] = ()  # the failures after which it is tried; empty: all


class Dispatcher:
    """The decisions of one gateway."""

    def __init__(
        self,
        replicas: ReplicaTable,
        state: RoutingState,
        timeouts: Timeouts,
        *,
        require_keys: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._state = state
        self.timeouts = timeouts
        self._require_keys = require_keys
        self._externals = ExternalModels(clock)
        self._budgets: dict[tuple[str, int], RetryBudget] = {}  # by a route's UID and its percentage

    def client(self, authorization: bytes) -> LLMClient | None:
        """Whose key it is; None where keys are not required. Raises a 401 or a 403."""
        return self.client_of(key_hash(authorization), is_missing=not authorization)

    def client_of(self, digest: str, *, is_missing: bool) -> LLMClient | None:
        """As `client`, of the digest of a key; ``is_missing``: there is none."""
        table = self._state.table
        client = table.clients.get(digest)
        if client is None:
            if self._require_keys or table.has_clients:
                raise _unauthorized(is_missing=is_missing)
            return None
        if client.suspended:
            raise ApiError(403, "This client is suspended.", kind="permission_error", code="client_suspended")
        return client

    def models(self, client: LLMClient | None) -> list[str]:
        """The names that a client may ask for, sorted."""
        table = self._state.table
        adapters = (name for name in table.adapters if self._place(name) is not None)
        names = {*table.routes, *(one.name for one in self._replicas.models()), *adapters}
        return sorted(name for name in names if client is None or client.may_ask(name))

    def parent(self, model: str, client: LLMClient | None) -> str | None:
        """The model of which a name is a LoRA adapter, where the client may ask for it; None of others."""
        place = None if model in self._state.table.routes else self._place(model)
        if place is None or place[1] == model or (client is not None and not client.may_ask(place[1])):
            return None
        return place[1]

    def _place(self, model: str) -> Place | None:
        """The LLMDeployment that has a name which no route has, as its own or an adapter's."""
        return self._replicas.place(model, self._state.table.adapters.get(model, ()))

    def names(self) -> tuple[set[str], set[str]]:
        """Of all models, by whatever name, and of all clients."""
        state, table = self._state, self._state.table
        places = self._replicas.places() | set(table.served_names)
        models = {*table.routes, *table.adapters, *(name for _, name in places)}
        for route in {one.uid: one for one in table.routes.values()}.values():
            models.update(route.deployments, route.shadows)
        models |= {PREFIX + name for _, name in table.externals}
        return models, {"/".join(place_of(body)) for body in state.clients.bodies()}

    def require(self, model: str, client: LLMClient | None) -> None:
        """Raise a 404 where a client cannot ask for a model."""
        if model not in self.models(client):
            raise self._not_found(model, client)

    def route(self, model: str, client: LLMClient | None) -> LLMRoute | None:
        """The route that has this name, if it is for the client and not switched off."""
        route = self._state.table.routes.get(model)
        if route is None or route.kill_switch.enabled or (client is not None and not client.may_ask(model)):
            return None
        return route

    def destination(self, call: Call, headers: Headers, client: LLMClient | None) -> Destination:
        """What the request goes to. Raises ApiError."""
        table = self._state.table
        if client is not None and not client.may_ask(call.model):
            raise self._not_found(call.model, client)
        if (route := table.routes.get(call.model)) is not None:
            return self._by_route(table, route, call, headers, client)
        place = self._place(call.model)
        replicas = None if place is None else self._replicas.at(place)
        if place is None or replicas is None:
            raise self._not_found(call.model, client)
        adapter = _adapter(table, place, call.model)
        name = adapter or _served_name(table, place, call.model)
        return Destination(call.model, replicas, name, replicas.retries, self.timeouts, adapter=adapter)

    def _not_found(self, model: str, client: LLMClient | None) -> ApiError:
        """OpenAI's answer for a model that is not there, or is not for this client: the two look alike."""
        there = ", ".join(self.models(client)) or "none"
        message = f"The model {model!r} is not served here; there is {there}."
        return ApiError(404, message, param="model", code="model_not_found")

    def _by_route(
        self, table: RoutingTable, route: LLMRoute, call: Call, headers: Headers, client: LLMClient | None
    ) -> Destination:
        is_killed = route.kill_switch.enabled
        if is_killed and route.kill_switch.mode == "Reject":
            raise kill_switch_refusal(route.kill_switch.message)
        rule = next((one for one in route.rules if matches(one, call, headers)), None)
        if rule is None:
            message = (
                f"No rule of the model {call.model!r} takes this request: its prompt is too long, or it "
                "does not have the headers, the tools or the class that they ask for."
            )
            raise ApiError(400, message, code="no_matching_rule")
        targets, key = _with_rollout(route, rule)
        target = self._target(route, targets, call, headers, client) or targets[0]
        steps = tuple(self._steps(table, route, call.model))
        if is_killed:
            switch = route.kill_switch
            return self._destination(table, route, call.model, target, fallbacks=steps, kill_switch=switch)
        seconds = 0 if target.external else route.cache_seconds
        version = self._version((route.namespace, target.deployment)) if seconds else ""
        arm = None
        if key is not None and route.rollout is not None:
            arm = Arm(route.uid, key, target.deployment == route.rollout.deployment)
        return self._destination(
            table,
            route,
            call.model,
            target,
            fallbacks=steps,
            cache_seconds=seconds,
            version=version,
            arm=arm,
            shadow=self._shadow(table, route, rule, call.model),
        )

    def _shadow(self, table: RoutingTable, route: LLMRoute, rule: Rule, asked: str) -> ShadowTarget | None:
        """What gets copies of requests by a rule."""
        if rule.shadow is None:
            return None
        found = self._destination(table, route, asked, Target(rule.shadow.deployment))
        shares = rule.shadow.percent, rule.shadow.max_in_flight
        return ShadowTarget(found.replicas, found.served_name, found.timeouts, *shares, found.adapter)

    def _version(self, place: Place) -> str:
        """Changes with each change of an LLMDeployment."""
        metadata = (self._state.deployments.get(place) or {}).get("metadata") or {}
        return f"{metadata.get('uid')} {metadata.get('generation')}"

    def _destination(
        self, table: RoutingTable, route: LLMRoute, asked: str, target: Target, **more: Any
    ) -> Destination:
        """A target of a route, which may have no replica. ``more``: further fields."""
        reliability, default = route.reliability, self.timeouts
        timeouts = Timeouts(
            first_byte=reliability.first_byte_seconds or default.first_byte,
            whole=default.whole,
            idle=reliability.idle_seconds or default.idle,
        )
        place = (route.namespace, target.key)
        adapter, charged = _adapter(table, place, asked), route.prices
        served = adapter or _served_name(table, place, target.deployment)
        model: Model | None = self._replicas.at(place)
        if (backend := table.externals.get((route.namespace, target.external))) is not None:
            model = self._externals.of(backend, table.externals.values())
            served, charged = backend.model, backend.prices
        return Destination(
            asked,
            model or self._replicas.without_replicas(place),
            served,
            self._budget(table, route),
            timeouts,
            reliability.attempts,
            charged,
            EXTERNAL_STRATEGY if target.external else route.strategy,
            hold=route.hold,
            hedge_seconds=reliability.hedge_seconds,
            route=f"{route.namespace}/{route.name}",
            adapter=adapter,
            **more,
        )

    def _steps(self, table: RoutingTable, route: LLMRoute, asked: str) -> Iterator[Step]:
        """The fallbacks of a route; with its kill switch on those that ask none of its targets."""
        is_killed = route.kill_switch.enabled
        killed = {target.key for rule in route.rules for target in rule.targets} if is_killed else set()
        if is_killed and route.rollout is not None:
            killed.add(route.rollout.deployment)
        for one in route.fallbacks:
            if one.canned is not None:
                yield Step("canned", canned=one.canned, only_on=one.only_on)
            elif one.halve_max_tokens:
                if not is_killed:
                    yield Step("halved_max_tokens", halves_max_tokens=True, only_on=one.only_on)
            elif (target := Target(one.deployment, external=one.external)).key not in killed:
                destination = self._destination(table, route, asked, target)
                yield Step(_step_name(one), destination, only_on=one.only_on)

    def _target(
        self,
        route: LLMRoute,
        targets: Sequence[Target],
        call: Call,
        headers: Headers,
        client: LLMClient | None,
    ) -> Target | None:
        """The target that this conversation stays with, among those that there are."""
        externals = self._state.table.externals
        there = [
            one
            for one in targets
            if (route.namespace, one.external) in externals
            or self._replicas.at((route.namespace, one.deployment))
        ]
        if call.kept_by is not None:
            there = [one for one in there if self._keeps(route, one, call.kept_by)] or there[:1]
        if len(there) < 2:
            return arms.choose(there, b"")
        session = headers.get(route.session_header) if route.session_header else None
        conversation: Iterable[str] = call.opening if session is None else (session,)
        whose = client.uid if client is not None else ""
        return arms.choose(there, arms.conversation_key(route.uid, whose, conversation))

    def _keeps(self, route: LLMRoute, target: Target, hint: str) -> bool:
        """Whether a target has the replica that keeps a response."""
        model = self._replicas.at((route.namespace, target.deployment))
        return model is not None and model.keeper(hint) is not None

    def keeper(self, hint: str) -> tuple[Model, Replica] | None:
        """The replica that keeps a response, whatever model it is of; None where it is gone."""
        for model in self._replicas.all_models():
            if hint and (found := model.keeper(hint)) is not None:
                return model, found
        return None

    def _budget(self, table: RoutingTable, route: LLMRoute) -> RetryBudget:
        key = (route.uid, route.reliability.retry_budget_percent)
        if key not in self._budgets:
            used = {(one.uid, one.reliability.retry_budget_percent) for one in table.routes.values()}
            self._budgets = {one: budget for one, budget in self._budgets.items() if one in used}
            self._budgets[key] = RetryBudget(key[1])
        return self._budgets[key]


def _with_rollout(route: LLMRoute, rule: Rule) -> tuple[tuple[Target, ...], StepKey | None]:
    """The targets of a rule with that of the rollout, by their present weights, and its step; None where
    there is no rollout, or it has no share.
    """
    if route.rollout is None:
        return rule.targets, None
    key, percent = rollout.current(route.rollout, route.rollout_status)
    if not percent:
        return rule.targets, None
    whole = sum(one.weight for one in rule.targets)
    others = tuple(replace(one, weight=one.weight * (100 - percent)) for one in rule.targets)
    return (*others, Target(route.rollout.deployment, whole * percent)), key


def matches(rule: Rule, call: Call, headers: Headers) -> bool:
    """Whether a rule is for a request."""
    longest, tools, request_class = rule.match.max_prompt_tokens, rule.match.tools, rule.match.request_class
    if tools not in (None, call.has_tools) or request_class not in ("", call.request_class):
        return False
    if any(headers.get(name) != value for name, value in rule.match.headers):
        return False
    return longest is None or estimated_tokens(call) <= longest


def kill_switch_refusal(message: str) -> ApiError:
    """The answer of a route that is switched off."""
    no_retry = (("x-should-retry", "false"),)
    return ApiError(503, message, kind="server_error", code="kill_switch", headers=no_retry)


def _step_name(fallback: Fallback) -> str:
    if fallback.external:
        return f"external={fallback.external}"
    return f"deployment={fallback.deployment}"


def _served_name(table: RoutingTable, place: Place, asked: str) -> str:
    """The name to send: the one that was asked for where the servers answer to it, else their first."""
    names = table.served_names.get(place)
    return asked if names is None or asked in names else names[0]


def _adapter(table: RoutingTable, place: Place, asked: str) -> str:
    """The adapter of an LLMDeployment that a name is; empty where it is none."""
    return asked if place in table.adapters.get(asked, ()) else ""


def _unauthorized(*, is_missing: bool) -> ApiError:
    message = (
        "No API key: send it as 'Authorization: Bearer KEY'." if is_missing else "The API key is not valid."
    )
    return ApiError(
        401,
        message,
        code="missing_api_key" if is_missing else "invalid_api_key",
        headers=(("www-authenticate", "Bearer"),),
    )
