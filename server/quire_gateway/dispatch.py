"""Where a request goes: whose key it has, what the name of its model stands for, which rule and which target.

Admission in its order: the key, then the names that the key is for, the kill switch, the rules. Decides from
the routing table and the replicas as they are now, without waiting for anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quire_gateway import arms, rollout
from quire_gateway.llm_client import LLMClient, key_hash
from quire_gateway.llm_route import (
    DEFAULT_HOLD,
    DEFAULT_STRATEGY,
    Hold,
    LLMRoute,
    Prices,
    Rule,
    Strategy,
    Target,
)
from quire_gateway.openai.calls import Call, estimated_tokens
from quire_gateway.replicas import Model, ReplicaTable
from quire_gateway.retry_budget import RetryBudget
from quire_gateway.rollout import Arm, StepKey
from quire_gateway.routing_state import RoutingState
from quire_gateway.routing_table import Place, RoutingTable
from quire_gateway.settings import Timeouts
from quire_http.errors import ApiError

DEFAULT_ATTEMPTS = 3

Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Destination:
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


@dataclass(frozen=True, slots=True)
class Step:
    """What is tried next where no replica answers. ``name``: in `x-quire-degraded` and the metrics."""

    name: str
    destination: Destination | None = None  # None: the same one
    halves_max_tokens: bool = False
    canned: str | None = None


class Dispatcher:
    """The decisions of one gateway."""

    def __init__(
        self, replicas: ReplicaTable, state: RoutingState, timeouts: Timeouts, *, require_keys: bool = False
    ) -> None:
        self._replicas = replicas
        self._state = state
        self._timeouts = timeouts
        self._require_keys = require_keys
        self._budgets: dict[tuple[str, int], RetryBudget] = {}  # by a route's UID and its percentage

    def client(self, authorization: bytes) -> LLMClient | None:
        """Whose key it is; None where keys are not required. Raises a 401 or a 403."""
        table = self._state.table
        client = table.clients.get(key_hash(authorization))
        if client is None:
            if self._require_keys or table.has_clients:
                raise _unauthorized(is_missing=not authorization)
            return None
        if client.suspended:
            raise ApiError(403, "This client is suspended.", kind="permission_error", code="client_suspended")
        return client

    def models(self, client: LLMClient | None) -> list[str]:
        """The names that a client may ask for, sorted."""
        names = {*self._state.table.routes, *(one.name for one in self._replicas.models())}
        return sorted(name for name in names if client is None or client.may_ask(name))

    def require(self, model: str, client: LLMClient | None) -> None:
        """Raise a 404 where a client cannot ask for a model."""
        if model not in self.models(client):
            raise self._not_found(model, client)

    def destination(self, call: Call, headers: Headers, client: LLMClient | None) -> Destination:
        """What the request goes to. Raises ApiError."""
        table = self._state.table
        if client is not None and not client.may_ask(call.model):
            raise self._not_found(call.model, client)
        if (route := table.routes.get(call.model)) is not None:
            return self._by_route(table, route, call, headers, client)
        place = self._replicas.place(call.model)
        replicas = None if place is None else self._replicas.at(place)
        if place is None or replicas is None:
            raise self._not_found(call.model, client)
        name = _served_name(table, place, call.model)
        return Destination(call.model, replicas, name, replicas.retries, self._timeouts)

    def _not_found(self, model: str, client: LLMClient | None) -> ApiError:
        """OpenAI's answer for a model that is not there, or is not for this client: the two look alike."""
        there = ", ".join(self.models(client)) or "none"
        message = f"The model {model!r} is not served here; there is {there}."
        return ApiError(404, message, param="model", code="model_not_found")

    def _by_route(
        self, table: RoutingTable, route: LLMRoute, call: Call, headers: Headers, client: LLMClient | None
    ) -> Destination:
        if route.kill_switch.enabled:
            no_retry = (("x-should-retry", "false"),)
            raise ApiError(
                503, route.kill_switch.message, kind="server_error", code="kill_switch", headers=no_retry
            )
        rule = next((one for one in route.rules if matches(one, call, headers)), None)
        if rule is None:
            message = (
                f"No rule of the model {call.model!r} takes this request: its prompt is too long, or it "
                "does not have the headers that they ask for."
            )
            raise ApiError(400, message, code="no_matching_rule")
        targets, key = _with_rollout(route, rule)
        target = self._target(route, targets, call, headers, client) or targets[0]
        destination = self._destination(table, route, call.model, target.deployment)
        steps = tuple(self._steps(table, route, call.model))
        version = self._version((route.namespace, target.deployment)) if route.cache_seconds else ""
        arm = None
        if key is not None and route.rollout is not None:
            arm = Arm(route.uid, key, target.deployment == route.rollout.deployment)
        return replace(
            destination, fallbacks=steps, cache_seconds=route.cache_seconds, version=version, arm=arm
        )

    def _version(self, place: Place) -> str:
        """Changes with each change of an LLMDeployment."""
        metadata = (self._state.deployments.get(place) or {}).get("metadata") or {}
        return f"{metadata.get('uid')} {metadata.get('generation')}"

    def _destination(self, table: RoutingTable, route: LLMRoute, asked: str, deployment: str) -> Destination:
        """A target of a route, which may have no replica."""
        place = (route.namespace, deployment)
        reliability = route.reliability
        timeouts = replace(
            self._timeouts,
            first_byte=reliability.first_byte_seconds or self._timeouts.first_byte,
            idle=reliability.idle_seconds or self._timeouts.idle,
        )
        return Destination(
            asked,
            self._replicas.at(place) or self._replicas.without_replicas(place),
            _served_name(table, place, deployment),
            self._budget(table, route),
            timeouts,
            reliability.attempts,
            route.prices,
            route.strategy,
            hold=route.hold,
        )

    def _steps(self, table: RoutingTable, route: LLMRoute, asked: str) -> Iterator[Step]:
        """The fallbacks of a route."""
        for one in route.fallbacks:
            if one.canned is not None:
                yield Step("canned", canned=one.canned)
            elif one.halve_max_tokens:
                yield Step("halved_max_tokens", halves_max_tokens=True)
            else:
                destination = self._destination(table, route, asked, one.deployment)
                yield Step(f"deployment={one.deployment}", destination)

    def _target(
        self,
        route: LLMRoute,
        targets: Sequence[Target],
        call: Call,
        headers: Headers,
        client: LLMClient | None,
    ) -> Target | None:
        """The target that this conversation stays with, among those that there are."""
        there = [one for one in targets if self._replicas.at((route.namespace, one.deployment))]
        if len(there) < 2:
            return arms.choose(there, b"")
        session = headers.get(route.session_header) if route.session_header else None
        conversation: Iterable[str] = call.opening if session is None else (session,)
        whose = client.uid if client is not None else ""
        return arms.choose(there, arms.conversation_key(route.uid, whose, conversation))

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
    others = tuple(Target(one.deployment, one.weight * (100 - percent)) for one in rule.targets)
    return (*others, Target(route.rollout.deployment, whole * percent)), key


def matches(rule: Rule, call: Call, headers: Headers) -> bool:
    """Whether a rule is for a request."""
    longest = rule.match.max_prompt_tokens
    if any(headers.get(name) != value for name, value in rule.match.headers):
        return False
    return longest is None or estimated_tokens(call) <= longest


def _served_name(table: RoutingTable, place: Place, asked: str) -> str:
    """The name to send: the one that was asked for where the servers answer to it, else their first."""
    names = table.served_names.get(place)
    return asked if names is None or asked in names else names[0]


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
