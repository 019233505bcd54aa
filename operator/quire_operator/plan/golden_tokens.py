"""Which golden tokens are kept: for each fingerprint the canary's answer of the first pod that was ready.

An entry never changes, whatever other pods answer later: `status` says who disagrees, and deleting the
ConfigMap begins anew. What is stored is the only memory, so an operator that restarts writes nothing. Entries
beyond the bound are dropped, the oldest first, but none that a pod still has.
"""

from __future__ import annotations

import json

from quire_operator import names
from quire_operator.observed import Body, Observed, Ref, golden_tokens, is_ready
from quire_operator.reports import MAX_GOLDEN_TOKENS, GoldenTokens
from quire_operator.resources import Manifest
from quire_operator.resources import golden_tokens as config_map
from quire_operator.spec import LLMDeployment


def with_golden_tokens(
    desired: tuple[Manifest, ...], model: LLMDeployment, observed: Observed
) -> tuple[Manifest, ...]:
    """The children, and the ConfigMap of golden tokens where some are known."""
    kept = _keep(observed)
    if not kept:
        return desired
    return (*desired, config_map.build(model, _text(kept)))


def awaited(observed: Observed) -> Ref | None:
    """The ConfigMap where it is to be created: before that its name is looked up, as that of each child."""
    target = Ref("ConfigMap", names.golden_tokens(observed.name))
    return target if target not in observed.children and _keep(observed) else None


def _keep(observed: Observed) -> tuple[GoldenTokens, ...]:
    kept = list(golden_tokens(observed))
    known = {one.canary.fingerprint for one in kept}
    answered = _answered(observed)
    for one in answered:
        if one.canary.fingerprint not in known:
            known.add(one.canary.fingerprint)
            kept.append(one)
    in_use = {one.canary.fingerprint for one in answered}
    spare = [one for one in kept if one.canary.fingerprint not in in_use]
    dropped = spare[: max(0, len(kept) - MAX_GOLDEN_TOKENS)]
    return tuple(one for one in kept if one not in dropped)[:MAX_GOLDEN_TOKENS]


def _answered(observed: Observed) -> list[GoldenTokens]:
    """The answers of the pods that serve, in the order in which they became ready."""
    found: list[tuple[str, str, GoldenTokens]] = []
    for pod in observed.pods:
        metadata = pod["metadata"]
        sample = observed.samples.get(str(metadata["uid"]))
        if sample is None or sample.canary is None or "deletionTimestamp" in metadata or not is_ready(pod):
            continue
        if sample.phase == "serving" and not sample.reason:
            name = str(metadata["name"])
            found.append((_ready_since(pod), name, GoldenTokens(canary=sample.canary, pod=name)))
    return [one for _, _, one in sorted(found, key=lambda entry: entry[:2])]


def _ready_since(pod: Body) -> str:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((str(c.get("lastTransitionTime", "")) for c in conditions if c.get("type") == "Ready"), "")


def _text(kept: tuple[GoldenTokens, ...]) -> str:
    entries = [
        {"fingerprint": one.canary.fingerprint, "tokens": list(one.canary.tokens), "pod": one.pod}
        for one in kept
    ]
    return json.dumps(entries, separators=(",", ":"))
