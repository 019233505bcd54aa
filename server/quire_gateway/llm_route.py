"""An LLMRoute as the gateway reads it: names of models, and rules by which LLMDeployments answer them.

The API server has checked what it stores. What is read here that breaks the schema, because its CRD is
another one, is no route, and says so in its status. Pure, and without any object but this one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

STRATEGIES = ("LeastLoad", "PowerOfTwo", "Prefix", "Random", "RoundRobin", "Session")
#: After which failures a fallback is tried.
OVERLOAD, UNAVAILABLE = "Overload", "Unavailable"
KILL_SWITCH_MODES = ("Fallback", "Reject")

_SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_PATH = re.compile(r"/[-A-Za-z0-9._~/]*", re.ASCII)


class ObjectError(Exception):
    """The object cannot be read."""


@dataclass(frozen=True, slots=True)
class Target:
    """An LLMDeployment or an LLMExternalBackend of the route's namespace, and its share."""

    deployment: str = ""
    weight: int = 1
    external: str = ""

    @property
    def key(self) -> str:
        """Unique among targets: no name of an LLMDeployment has a slash."""
        return f"external/{self.external}" if self.external else self.deployment


@dataclass(frozen=True, slots=True)
class Match:
    """What a request must be, all of it."""

    max_prompt_tokens: int | None = None
    headers: tuple[tuple[str, str], ...] = ()
    tools: bool | None = None  # whether it has some
    request_class: str = ""  # by the route's classifier


@dataclass(frozen=True, slots=True)
class Shadow:
    """An LLMDeployment that gets copies of requests, and how many of them."""

    deployment: str
    percent: int = 100
    max_in_flight: int = 4  # in each gateway


@dataclass(frozen=True, slots=True)
class Rule:
    """The first that matches decides."""

    targets: tuple[Target, ...]
    match: Match = Match()
    shadow: Shadow | None = None


@dataclass(frozen=True, slots=True)
class Classifier:
    """A Service of the route's namespace that says which class a request is of."""

    service: str
    port: int = 80
    path: str = "/"

    def url(self, namespace: str) -> str:
        """Where it is asked."""
        return f"http://{self.service}.{namespace}.svc:{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class Reliability:
    """Seconds that an answer may take, None: as the gateway has it; how often another replica is asked."""

    first_byte_seconds: int | None = None
    idle_seconds: int | None = None
    attempts: int = 3
    retry_budget_percent: int = 20
    hedge_seconds: float | None = None  # after which another one is asked beside one that is slow


@dataclass(frozen=True, slots=True)
class KillSwitch:
    """Whether the targets get no requests, what is said, and whether the fallbacks answer."""

    enabled: bool = False
    message: str = "This model is switched off."
    mode: str = "Reject"  # or "Fallback"


@dataclass(frozen=True, slots=True)
class Fallback:
    """What is tried where no replica answers: one of these. ``only_on``: the failures; none for all."""

    halve_max_tokens: bool = False
    deployment: str = ""
    external: str = ""
    canned: str | None = None
    only_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a replica of a target is chosen. ``session_header``: of Session."""

    name: str = "Prefix"
    session_header: str = "x-session-id"


DEFAULT_STRATEGY = Strategy()


class Prices(NamedTuple):
    """Of a million tokens, in whatever currency an installation counts."""

    prompt_per_million: Decimal = Decimal(0)
    completion_per_million: Decimal = Decimal(0)


@dataclass(frozen=True, slots=True)
class Hold:
    """How long a request waits for a model that is started, and how many do in one gateway."""

    max_seconds: int = 300
    max_requests: int = 200


DEFAULT_HOLD = Hold()


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """A share of the conversations in percent, and for how long."""

    weight: int
    pause_seconds: int = 600


@dataclass(frozen=True, slots=True)
class AbortOn:
    """What takes the share away again. ``ttft_percent``: of what the other deployments take."""

    error_percent: int | None = None
    ttft_percent: int | None = None
    min_requests: int = 50


@dataclass(frozen=True, slots=True)
class Rollout:
    """How conversations move to another LLMDeployment."""

    deployment: str
    steps: tuple[RolloutStep, ...]
    abort_on: AbortOn = AbortOn()


@dataclass(frozen=True, slots=True)
class LLMRoute:
    """One route."""

    namespace: str
    name: str
    uid: str
    created: str  # as Kubernetes writes it, which sorts by time
    models: tuple[str, ...]
    rules: tuple[Rule, ...]
    session_header: str = ""
    strategy: Strategy = DEFAULT_STRATEGY
    classifier: Classifier | None = None
    reliability: Reliability = field(default=Reliability())
    kill_switch: KillSwitch = field(default=KillSwitch())
    prices: Prices = field(default=Prices())
    fallbacks: tuple[Fallback, ...] = ()
    hold: Hold = DEFAULT_HOLD
    rollout: Rollout | None = None
    rollout_status: Mapping[str, Any] = field(default_factory=dict)  # where the gateways are with it
    cache_seconds: int = 0  # for which an answer is given again

    @property
    def deployments(self) -> list[str]:
        """Every target's and fallback's, once."""
        targets = [target.deployment for target in self._targets if target.deployment]
        rollout = [self.rollout.deployment] if self.rollout is not None else []
        fallbacks = [one.deployment for one in self.fallbacks if one.deployment]
        return list(dict.fromkeys(targets + rollout + fallbacks))

    @property
    def shadows(self) -> list[str]:
        """The LLMDeployments that get copies, once."""
        return list(dict.fromkeys(rule.shadow.deployment for rule in self.rules if rule.shadow is not None))

    @property
    def externals(self) -> list[str]:
        """The LLMExternalBackends among targets and fallbacks, once."""
        names = [one.external for one in self._targets] + [one.external for one in self.fallbacks]
        return list(dict.fromkeys(filter(None, names)))

    @property
    def _targets(self) -> list[Target]:
        return [target for rule in self.rules for target in rule.targets]


def parse(body: Mapping[str, Any]) -> LLMRoute:
    """The route of an object. Raises ObjectError."""
    try:
        metadata, spec = body["metadata"], body["spec"]
        return LLMRoute(
            namespace=str(metadata["namespace"]),
            name=str(metadata["name"]),
            uid=str(metadata["uid"]),
            created=str(metadata["creationTimestamp"]),
            models=tuple(map(str, spec["models"])),
            rules=tuple(map(_rule, spec["rules"])),
            session_header=str((spec.get("routing") or {}).get("sessionHeader") or ""),
            strategy=_strategy(spec.get("routing") or {}),
            classifier=_classifier((spec.get("routing") or {}).get("classifier")),
            reliability=_reliability(spec.get("reliability") or {}),
            kill_switch=_kill_switch(spec.get("killSwitch") or {}),
            prices=prices(spec.get("prices") or {}),
            hold=_hold(spec.get("hold") or {}),
            rollout=_rollout(spec["rollout"]) if spec.get("rollout") else None,
            rollout_status=dict((body.get("status") or {}).get("rollout") or {}),
            cache_seconds=int((spec.get("cache") or {}).get("ttlSeconds", 0)),
            fallbacks=tuple(map(_fallback, spec.get("fallbacks") or ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError, InvalidOperation) as error:
        raise ObjectError(f"the spec cannot be read: {error!r}") from None


def _rule(body: Mapping[str, Any]) -> Rule:
    match = body.get("match") or {}
    longest = match.get("maxPromptTokens")
    headers = tuple((str(name), str(value)) for name, value in (match.get("headers") or {}).items())
    if not (targets := tuple(map(_target, body["targets"]))):
        raise ValueError("a rule has no targets")
    tools = match.get("tools")
    if tools not in (None, True, False):
        raise ValueError(f"match.tools is {tools!r}")
    request = Match(None if longest is None else int(longest), headers, tools, str(match.get("class", "")))
    return Rule(targets, request, _shadow(body["shadow"]) if body.get("shadow") else None)


def _shadow(body: Mapping[str, Any]) -> Shadow:
    return Shadow(
        str(body["deployment"]),
        int(body.get("percent", Shadow("").percent)),
        int(body.get("maxInFlight", Shadow("").max_in_flight)),
    )


def _classifier(body: Mapping[str, Any] | None) -> Classifier | None:
    if not body:
        return None
    default = Classifier(str(body["service"]))
    found = replace(
        default, port=int(body.get("port", default.port)), path=str(body.get("path", default.path))
    )
    if _SERVICE.fullmatch(found.service) is None or _PATH.fullmatch(found.path) is None:
        raise ValueError(f"routing.classifier is {body!r}")
    return found


def _target(body: Mapping[str, Any]) -> Target:
    external = str(body.get("external", ""))
    return Target("" if external else str(body["deployment"]), int(body.get("weight", 1)), external)


def _reliability(body: Mapping[str, Any]) -> Reliability:
    first_byte, idle = body.get("firstByteTimeoutSeconds"), body.get("idleTimeoutSeconds")
    hedge = body.get("hedgeAfterMilliseconds")
    return Reliability(
        first_byte_seconds=None if first_byte is None else int(first_byte),
        idle_seconds=None if idle is None else int(idle),
        attempts=int(body.get("attempts", Reliability().attempts)),
        retry_budget_percent=int(body.get("retryBudgetPercent", Reliability().retry_budget_percent)),
        hedge_seconds=None if hedge is None else int(hedge) / 1000,
    )


def _kill_switch(body: Mapping[str, Any]) -> KillSwitch:
    default = KillSwitch()
    mode = body.get("mode", default.mode)
    if mode not in KILL_SWITCH_MODES:
        raise ValueError(f"killSwitch.mode is {mode!r}")
    return KillSwitch(body.get("enabled", False) is True, str(body.get("message", default.message)), mode)


def _fallback(body: Mapping[str, Any]) -> Fallback:
    canned, only_on = body.get("canned"), tuple(body.get("onlyOn") or ())
    if not {*only_on} <= {OVERLOAD, UNAVAILABLE}:
        raise ValueError(f"onlyOn is {only_on!r}")
    return Fallback(
        halve_max_tokens=body.get("halveMaxTokens", False) is True,
        deployment=str(body.get("deployment", "")),
        external=str(body.get("external", "")),
        canned=None if canned is None else str(canned),
        only_on=only_on,
    )


def _strategy(body: Mapping[str, Any]) -> Strategy:
    name, header = body.get("strategy", DEFAULT_STRATEGY.name), body.get("sessionHeader")
    if name not in STRATEGIES:
        raise ValueError(f"routing.strategy is {name!r}")
    return Strategy(name, str(header)) if name == "Session" and header else Strategy(name)


def _rollout(body: Mapping[str, Any]) -> Rollout:
    abort = body.get("abortOn") or {}
    errors, ttft = abort.get("errorPercent"), abort.get("ttftPercent")
    if not body["steps"]:
        raise ValueError("rollout.steps is empty")
    return Rollout(
        deployment=str(body["deployment"]),
        steps=tuple(
            RolloutStep(int(one["weight"]), int(one.get("pauseSeconds", RolloutStep(0).pause_seconds)))
            for one in body["steps"]
        ),
        abort_on=AbortOn(
            error_percent=None if errors is None else int(errors),
            ttft_percent=None if ttft is None else int(ttft),
            min_requests=int(abort.get("minRequests", AbortOn().min_requests)),
        ),
    )


def _hold(body: Mapping[str, Any]) -> Hold:
    return Hold(
        int(body.get("maxSeconds", DEFAULT_HOLD.max_seconds)),
        int(body.get("maxRequests", DEFAULT_HOLD.max_requests)),
    )


def prices(body: Mapping[str, Any]) -> Prices:
    """Those of a route, or of an external backend."""
    found = Prices(Decimal(body.get("promptPerMillion", "0")), Decimal(body.get("completionPerMillion", "0")))
    if not all(one.is_finite() for one in found):
        raise ValueError(f"prices are {body!r}")
    return found
