"""What the gateway reads, to test with: the CRDs, objects with every field, and cases for every CEL rule.

Used on a real API server against the CRDs, and against what the gateway reads of such objects.
"""

from __future__ import annotations

from typing import Any

from e2e import yaml_files
from e2e.api.specs import ROOT, Body, merged, schemas

CRDS: dict[str, Body] = {
    plural: yaml_files.load((ROOT / "crds" / f"{plural}.yaml").read_text(encoding="utf-8"))
    for plural in ("llmroutes", "llmclients", "llmexternalbackends")
}
SCHEMAS: dict[str, Body] = {
    plural: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for plural, crd in CRDS.items()
}

ROUTE: Body = {
    "apiVersion": "serving.quire.dev/v1alpha1",
    "kind": "LLMRoute",
    "metadata": {"name": "chat", "namespace": "default"},
    "spec": {
        "models": ["org/chat", "chat"],
        "rules": [
            {
                "match": {
                    "maxPromptTokens": 8000,
                    "headers": {"x-team": "search"},
                    "tools": True,
                    "class": "simple",
                },
                "shadow": {"deployment": "newer", "percent": 5, "maxInFlight": 2},
                "targets": [
                    {"deployment": "small", "weight": 90},
                    {"deployment": "next", "weight": 10},
                    {"external": "outside", "weight": 5},
                ],
            },
            {"targets": [{"deployment": "large", "weight": 2}]},
        ],
        "routing": {
            "strategy": "Session",
            "sessionHeader": "x-thread",
            "classifier": {"service": "classes", "port": 8080, "path": "/classify"},
        },
        "reliability": {
            "firstByteTimeoutSeconds": 5,
            "idleTimeoutSeconds": 7,
            "attempts": 2,
            "retryBudgetPercent": 30,
            "hedgeAfterMilliseconds": 800,
        },
        "killSwitch": {"enabled": True, "message": "Closed.", "mode": "Fallback"},
        "prices": {"promptPerMillion": "0.15", "completionPerMillion": "0.6"},
        "hold": {"maxSeconds": 60, "maxRequests": 50},
        "rollout": {
            "deployment": "newest",
            "steps": [{"weight": 10, "pauseSeconds": 60}, {"weight": 100, "pauseSeconds": 1}],
            "abortOn": {"errorPercent": 5, "ttftPercent": 150, "minRequests": 20},
        },
        "cache": {"ttlSeconds": 300},
        "fallbacks": [
            {"halveMaxTokens": True},
            {"deployment": "tiny"},
            {"external": "elsewhere", "onlyOn": ["Overload"]},
            {"canned": "Later."},
        ],
    },
}
CLIENT: Body = {
    "apiVersion": "serving.quire.dev/v1alpha1",
    "kind": "LLMClient",
    "metadata": {"name": "search", "namespace": "default"},
    "spec": {
        "keyHashes": ["0" * 64],
        "allowedModels": ["org/chat"],
        "suspended": True,
        "limits": {"requestsPerMinute": 600, "tokensPerMinute": 200_000, "concurrentRequests": 8},
        "budget": {"period": "Day", "tokens": 10_000_000, "cost": "250.00"},
    },
}
_BUNDLE = "-----BEGIN CERTIFICATE-----"
EXTERNAL: Body = {
    "apiVersion": "serving.quire.dev/v1alpha1",
    "kind": "LLMExternalBackend",
    "metadata": {"name": "outside", "namespace": "default"},
    "spec": {
        "baseURL": "https://api.example.com/v1",
        "model": "gpt-4o-mini",
        "allowPlainHTTP": True,
        "apiKeySecretRef": {"name": "openai", "key": "token"},
        "caBundle": _BUNDLE,
        "requestsPerMinute": 60,
        "prices": {"promptPerMillion": "0.15", "completionPerMillion": "0.6"},
    },
}
EVERY: tuple[Body, ...] = (ROUTE, CLIENT, EXTERNAL)
LEAST: tuple[Body, ...] = (
    {**ROUTE, "spec": {"models": ["chat"], "rules": [{"targets": [{"deployment": "small"}]}]}},
    {**CLIENT, "spec": {"keyHashes": []}},
    {**EXTERNAL, "spec": {"baseURL": "https://api.example.com/v1", "model": "gpt-4o-mini"}},
)


def route(**spec: Any) -> Body:
    """A route with parts of the spec replaced."""
    return merged(LEAST[0], {"spec": spec})


def client(**spec: Any) -> Body:
    """A client with parts of the spec replaced."""
    return merged(LEAST[1], {"spec": spec})


def external(**spec: Any) -> Body:
    """An external backend with parts of the spec replaced."""
    return merged(LEAST[2], {"spec": spec})


def rules() -> list[str]:
    """Every CEL rule: path#index; of the kinds whose paths another one has, too, after the kind's name."""
    return [
        f"{'LLMExternalBackend ' if plural == 'llmexternalbackends' else ''}{path}#{index}"
        for plural, schema in SCHEMAS.items()
        for path, inner in schemas(schema)
        for index, _ in enumerate(inner.get("x-kubernetes-validations", []))
    ]


_TARGETS = [{"deployment": "small"}]
_SHORT = {"match": {"maxPromptTokens": 1}, "targets": _TARGETS}
_ANY = {"targets": _TARGETS}

#: By rule: what is accepted, what is refused.
CASES: dict[str, tuple[tuple[Body, ...], tuple[Body, ...]]] = {
    "#0": (
        (merged(LEAST[1], {"metadata": {"name": "x" * 63}}),),
        (merged(LEAST[1], {"metadata": {"name": "x" * 64}}),),
    ),
    "spec.budget#0": (
        (client(budget={"tokens": 1}), client(budget={"cost": "0.000001"})),
        (client(budget={"period": "Day"}), client(budget={})),
    ),
    "spec#0": (
        (route(rollout={"deployment": "next", "steps": [{"weight": 10}]}),),
        (route(rollout={"deployment": "small", "steps": [{"weight": 10}]}),),
    ),
    "spec#1": (
        (
            route(
                rules=[{"match": {"class": "a"}, "targets": _TARGETS}],
                routing={"classifier": {"service": "classes"}},
            ),
            route(rules=[{"match": {"tools": True}, "targets": _TARGETS}]),
        ),
        (route(rules=[{"match": {"class": "a"}, "targets": _TARGETS}]),),
    ),
    "spec.reliability#0": (
        tuple(route(reliability={"hedgeAfterMilliseconds": 500, **more}) for more in ({}, {"attempts": 2})),
        tuple(
            route(reliability={"hedgeAfterMilliseconds": 500, **more})
            for more in ({"attempts": 1}, {"retryBudgetPercent": 0})
        ),
    ),
    "spec.reliability#1": (
        (route(reliability={"hedgeAfterMilliseconds": 999, "firstByteTimeoutSeconds": 1}),),
        (route(reliability={"hedgeAfterMilliseconds": 1000, "firstByteTimeoutSeconds": 1}),),
    ),
    "spec.rollout.abortOn#0": (
        tuple(
            route(rollout={"deployment": "next", "steps": [{"weight": 10}], "abortOn": limits})
            for limits in ({"errorPercent": 0}, {"ttftPercent": 120, "minRequests": 9})
        ),
        tuple(
            route(rollout={"deployment": "next", "steps": [{"weight": 10}], "abortOn": limits})
            for limits in ({}, {"minRequests": 9})
        ),
    ),
    "spec.rules#0": (
        (route(rules=[_SHORT, _ANY]), route(rules=[_SHORT, _SHORT])),
        (route(rules=[_ANY, _SHORT]), route(rules=[_ANY, _ANY])),
    ),
    "spec.rules[].match.headers#0": (
        (route(rules=[{**_ANY, "match": {"headers": {"x-team": "a"}}}]),),
        (
            route(rules=[{**_ANY, "match": {"headers": {"X-Team": "a"}}}]),
            route(rules=[{**_ANY, "match": {"headers": {"authorization": "a"}}}]),
        ),
    ),
    "spec.rules[].targets#0": (
        (route(rules=[{"targets": [{"deployment": "a"}, {"external": "a"}, {"external": "b"}]}]),),
        (
            route(rules=[{"targets": [*_TARGETS, *_TARGETS]}]),
            route(
                rules=[{"targets": [{"external": "a"}, {"deployment": "a"}, {"external": "a", "weight": 2}]}]
            ),
        ),
    ),
    "spec.rules[].targets#1": (
        (route(rules=[{"targets": [{"deployment": "a", "weight": 0}, {"deployment": "b"}]}]),),
        (route(rules=[{"targets": [{"deployment": "a", "weight": 0}]}]),),
    ),
    "spec.rules[].targets[]#0": (
        (route(rules=[{"targets": [{"external": "a"}]}]),),
        (
            route(rules=[{"targets": [{"weight": 1}]}]),
            route(rules=[{"targets": [{"deployment": "a", "external": "a"}]}]),
        ),
    ),
    "spec.fallbacks[]#0": (
        (route(fallbacks=[{"external": "a", "onlyOn": ["Overload", "Unavailable"]}, {"canned": ""}]),),
        (
            route(fallbacks=[{}]),
            route(fallbacks=[{"onlyOn": ["Overload"]}]),
            route(fallbacks=[{"deployment": "a", "canned": "b"}]),
        ),
    ),
    "LLMExternalBackend #0": (
        (merged(LEAST[2], {"metadata": {"name": "x" * 63}}),),
        (merged(LEAST[2], {"metadata": {"name": "x" * 64}}),),
    ),
    "LLMExternalBackend spec#0": (
        (external(baseURL="http://vllm.example.com:8000/v1", allowPlainHTTP=True),),
        (external(baseURL="http://vllm.example.com:8000/v1"),),
    ),
    "LLMExternalBackend spec#1": (
        (external(apiKeySecretRef={"name": "openai"}),),
        (external(baseURL="http://a.example.com", allowPlainHTTP=True, apiKeySecretRef={"name": "openai"}),),
    ),
    "LLMExternalBackend spec.baseURL#0": (
        (external(baseURL="https://a.example.com"), external(baseURL="https://10.1.2.3:8443/openai/v1/")),
        tuple(
            external(baseURL=f"https://{rest}")
            for rest in (
                "user:key@a.example.com/v1",
                "a.example.com/v1?a=b",
                "a.example.com/#b",
                "",
                "/v1",
                "a b",
            )
        ),
    ),
}

#: What the schema refuses without a rule.
REFUSED: tuple[Body, ...] = (
    route(models=[]),
    route(models=["a b"]),
    route(rules=[]),
    route(rules=[{**_ANY, "match": {}}]),
    route(routing={"sessionHeader": "X-Session"}),
    route(reliability={"attempts": 0}),
    client(keyHashes=["sk-in-the-clear"]),
    client(keyHashes=["A" * 64]),
    client(limits={}),
    client(limits={"requestsPerMinute": 0}),
    client(budget={"cost": "-1"}),
    client(budget={"cost": "1e9"}),
    client(budget={"tokens": 1, "period": "Year"}),
    route(prices={"promptPerMillion": "free"}),
    route(routing={"strategy": "Sticky"}),
    route(cache={"ttlSeconds": 0}),
    route(rollout={"deployment": "next", "steps": []}),
    route(rollout={"deployment": "next", "steps": [{"weight": 0}]}),
    route(rollout={"deployment": "next", "steps": [{"weight": 101}]}),
    route(hold={"maxSeconds": -1}),
    route(fallbacks=[{"canned": "a", "onlyOn": []}]),
    route(fallbacks=[{"canned": "a", "onlyOn": ["Sunday"]}]),
    route(killSwitch={"mode": "Off"}),
    route(rules=[{**_ANY, "shadow": {"deployment": "a", "percent": 0}}]),
    route(rules=[{**_ANY, "shadow": {"percent": 5}}]),
    route(routing={"classifier": {"service": "classes.other"}}),
    route(routing={"classifier": {"service": "classes", "path": "/?x=y"}}),
    external(baseURL="ftp://a.example.com"),
    external(apiKeySecretRef={"name": "../openai"}),
    external(apiKeySecretRef={"name": "openai", "key": ".."}),
    external(caBundle="none"),
    external(requestsPerMinute=0),
    route(fallbacks=[{"halveMaxTokens": False}]),
    route(fallbacks=[{"canned": "a"}] * 5),
)
