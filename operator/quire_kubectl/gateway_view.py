"""LLMRoutes and LLMClients as text: what gets requests now, what is refused, and what to do.

Pure; from documents of the API. Of keys only their number is shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from quire_kubectl.terminal import Look
from quire_kubectl.view import PLAIN, text

Document = Mapping[str, Any]

_REMEDIES = {
    "NameConflict": "Give it other names in spec.models, or delete the older one that has them.",
    "KeyConflict": "Remove the digest from one of the two: a key is of one client.",
    "Unreadable": "Correct the spec: the message names what cannot be read.",
    "DeploymentNotFound": "Create the LLMDeployment, or take it out of the targets.",
    "NoReplica": "kubectl quire status NAME says why the target's pods are not ready.",
    "KillSwitch": "Set spec.killSwitch.enabled to false to serve again.",
    "Aborted": "Correct the new deployment, then change spec.rollout: it is tried again only then.",
    "Suspended": "Set spec.suspended to false to accept its keys again.",
    "NoKey": "Add a digest to spec.keyHashes: kubectl quire key NAME makes one.",
    "BudgetSpent": "Raise spec.budget, or wait for the end of the period.",
}


def route_details(route: Document, deployments: Mapping[str, Document], look: Look = PLAIN) -> str:
    """``deployments``: LLMDeployments of its namespace by name."""
    spec, status = route["spec"], route.get("status") or {}
    facts: list[tuple[str, str]] = [("models", ", ".join(map(text, spec["models"])))]
    switch = spec.get("killSwitch") or {}
    if switch.get("enabled"):
        facts.append(("kill switch", f"ON, at {_applied(route)}: {text(switch.get('message'))}"))
    rollout, rolled = spec.get("rollout"), status.get("rollout") or {}
    percent = int(rolled.get("currentWeight") or 0) if rollout else 0
    for number, rule in enumerate(spec["rules"]):
        facts.append((f"rule {number + 1}", _match(rule.get("match") or {})))
        targets = [(one["deployment"], one.get("weight", 1)) for one in rule["targets"]]
        whole = sum(weight for _, weight in targets)
        shares = [(name, weight * (100 - percent) / whole if whole else 0) for name, weight in targets]
        shares += [(rollout["deployment"], percent)] if rollout else []
        facts += [("", f"{share:3.0f} % {_replicas(name, deployments)}") for name, share in shares]
    if rollout:
        step, steps = int(rolled.get("step") or 0) + 1, len(rollout["steps"])
        phase = text(rolled.get("phase")) or "not begun"
        facts.append(("rollout", f"to {text(rollout['deployment'])}: {phase}, step {step} of {steps}"))
        facts.append(("", text(rolled.get("message"))))
    return _page(route, facts, look)


def client_details(client: Document, look: Look = PLAIN) -> str:
    """What it may use, and what it has used."""
    spec, usage = client["spec"], (client.get("status") or {}).get("usage") or {}
    limits, budget = spec.get("limits") or {}, spec.get("budget") or {}
    keys = len(spec.get("keyHashes") or ())
    facts = [
        ("keys", f"{keys}, refused: spec.suspended is true" if spec.get("suspended") else str(keys)),
        ("models", ", ".join(map(text, spec.get("allowedModels") or ())) or "all"),
        ("limits", ", ".join(_limits(limits)) or "none"),
        ("budget", ", ".join(_budget(budget, usage)) or "none"),
    ]
    if usage:
        used = f"{usage.get('totalTokens', 0)} tokens in {usage.get('requests', 0)} requests"
        facts.append(("used", f"{text(usage.get('period'))}: {used}, cost {text(usage.get('cost'))}"))
    return _page(client, facts, look)


def table(kind: str, documents: Sequence[Document], look: Look = PLAIN) -> str:
    """One line each, those that are not ready first."""
    rows = sorted(_row(one) for one in documents)
    if not rows:
        return f"No {kind}s here."
    heads = ("NAMESPACE", "NAME", "READY", "REASON", "GATEWAYS")
    lines = [
        heads,
        *((namespace, name, ready, reason, seen) for ready, namespace, name, reason, seen in rows),
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(look.cut("   ".join(map(str.ljust, line, widths)).rstrip()) for line in lines)


def code(document: Document) -> int:
    """0: ready, and all gateways use this spec; 3: not."""
    status = document.get("status") or {}
    ready = _conditions(status).get("Ready") or {}
    gateways = status.get("gateways") or {}
    is_current = status.get("observedGeneration") == document["metadata"].get("generation")
    is_everywhere = gateways.get("applied") == gateways.get("seen") and bool(gateways.get("seen"))
    return 0 if ready.get("status") == "True" and is_current and is_everywhere else 3


def _page(document: Document, facts: Sequence[tuple[str, str]], look: Look) -> str:
    metadata, status = document["metadata"], document.get("status") or {}
    ready = _conditions(status).get("Ready") or {}
    state = "Ready" if ready.get("status") == "True" else text(ready.get("reason")) or "Unknown"
    colour = "green" if state == "Ready" else "red"
    heading = f"{text(metadata['namespace'])}/{text(metadata['name'])}: {look.paint(state, colour)}"
    message = text(ready.get("message")) or "No gateway has looked at it yet: is one running?"
    lines = [heading, *look.wrapped(message, "  ", "  "), ""]
    shown = {message, *(value for _, value in facts)}
    for name, value in (*facts, ("gateways", _applied(document)), *_troubles(status, shown)):
        lines += look.wrapped(value, f"  {name:14}", " " * 16) if value else []
    return "\n".join(lines)


def _troubles(status: Document, shown: Collection[str]) -> Iterator[tuple[str, str]]:
    """Conditions that are not as they should be, and what to do about them."""
    remedies = []
    for kind, one in _conditions(status).items():
        reason, message = text(one.get("reason")), text(one.get("message"))
        if one.get("status") == "True":
            continue
        if message not in shown:
            yield kind, f"{reason}: {message}"
        if (remedy := _REMEDIES.get(reason)) is not None and remedy not in remedies:
            remedies.append(remedy)
    yield from (("do", remedy) for remedy in remedies)


def _applied(document: Document) -> str:
    status = document.get("status") or {}
    gateways = status.get("gateways") or {}
    if status.get("observedGeneration") != document["metadata"].get("generation"):
        return "this change has reached none that writes the status yet"
    return f"{gateways.get('applied', 0)} of {gateways.get('seen', 0)} gateways use this"


def _replicas(name: str, deployments: Mapping[str, Document]) -> str:
    if name not in deployments:
        return f"{text(name)} (there is no such LLMDeployment)"
    status = deployments[name].get("status") or {}
    ready = f"{status.get('readyReplicas', 0)} of {status.get('replicas', 0)} replicas ready"
    return f"{text(name)} ({text(status.get('phase')) or 'Unknown'}, {ready})"


def _match(match: Document) -> str:
    parts = [f"{name}: {value}" for name, value in match.items() if not isinstance(value, dict)]
    parts += [f"{name}: {value}" for name, value in (match.get("headers") or {}).items()]
    return text(", ".join(parts)) or "all requests"


def _limits(limits: Document) -> Iterator[str]:
    names = {
        "requestsPerMinute": "requests a minute",
        "tokensPerMinute": "tokens a minute",
        "concurrentRequests": "requests at once",
    }
    for field, name in names.items():
        if limits.get(field) is not None:
            yield f"{limits[field]} {name}"


def _budget(budget: Document, usage: Document) -> Iterator[str]:
    period = text(budget.get("period") or "Month").lower()
    for field, used, unit in (("tokens", "totalTokens", " tokens"), ("cost", "cost", "")):
        if budget.get(field) is not None:
            yield f"{_share(usage.get(used), budget[field])} of {budget[field]}{unit} a {period}"


def _share(used: object, whole: object) -> str:
    try:
        return f"{Decimal(str(used or 0)) / Decimal(str(whole)):.0%}"
    except (InvalidOperation, ZeroDivisionError):
        return f"{used}"


def _row(document: Document) -> tuple[str, str, str, str, str]:
    status = document.get("status") or {}
    ready, gateways = _conditions(status).get("Ready") or {}, status.get("gateways") or {}
    return (
        text(ready.get("status")) or "Unknown",
        text(document["metadata"]["namespace"]),
        text(document["metadata"]["name"]),
        text(ready.get("reason")),
        f"{gateways.get('applied', 0)}/{gateways.get('seen', 0)}",
    )


def _conditions(status: Document) -> dict[str, Document]:
    return {text(one.get("type")): one for one in status.get("conditions") or () if isinstance(one, Mapping)}
