"""Accepted and refused objects for the rules of kvCache, weightOffload, speculation and adapters in
`engine`. Part of `cases`.
"""

from __future__ import annotations

from typing import Any

from e2e.api.specs import Body, minimal

_PROFILE = {"memory": "2Gi", "profileRef": {"name": "h100"}}


def _cache(memory: str | int, of: str = "2Gi", **fields: str | int) -> Body:
    return minimal(engine={"kvCache": {"memory": memory, **fields}}, resources={"memory": of})


def _tiers(**fields: str | int) -> Body:
    return minimal(engine={"kvCache": fields}, resources={"memory": "2Gi"})


def _weights(size: str | int, *, host_offload: str = "", gpu: bool = True) -> Body:
    engine = {"weightOffload": size, **({"kvCache": {"hostOffload": host_offload}} if host_offload else {})}
    return minimal(engine=engine, resources={"memory": "2Gi", **({"gpu": {}} if gpu else {})})


def _drafts(**fields: str | int) -> Body:
    return minimal(engine={"speculation": fields})


_HUGE = "9" * 18 + "Ti"
_NO_SIZES = ("0", 0, -1, "1e3", "1 Gi", "lots", "")


# By rule: the arguments of `cases.Cases`.
def _adapters(**fields: str | int) -> Body:
    return minimal(engine=fields)


KV_CASES: dict[str, dict[str, Any]] = {
    "spec#36": {
        "field": "spec.engine",
        "accepted": (
            minimal(engine={"maxAdapters": 4}, parallelism={"tensor": 2}, resources={"cpu": "2"}),
            minimal(engine={"maxAdapters": 4}, parallelism={"pipeline": 2}, resources={"cpu": "2"}),
            minimal(disaggregation={"prefill": {}}),
        ),
        "refused": (
            minimal(engine={"maxAdapters": 4}, disaggregation={"prefill": {}}),
            minimal(
                engine={"maxAdapters": 4, "weightOffload": "1Gi"}, resources={"memory": "4Gi", "gpu": {}}
            ),
        ),
    },
    "spec.engine#0": {
        "field": "spec.engine.maxAdapters",
        "accepted": (
            _adapters(maxAdapters=1),
            _adapters(maxAdapters=64, maxAdapterRank=64, adaptersPath="."),
            _adapters(adaptersPath=""),
        ),
        "refused": (_adapters(maxAdapterRank=8), _adapters(adaptersPath="adapters")),
    },
    "spec.engine.adaptersPath#0": {
        "field": "spec.engine.adaptersPath",
        "accepted": (_adapters(maxAdapters=1, adaptersPath="a/..b"),),
        "refused": tuple(_adapters(maxAdapters=1, adaptersPath=path) for path in ("/a", "..", "a/../../b")),
    },
    "spec#0": {
        "field": "spec.engine",
        "accepted": (
            _cache("1Gi"),
            _cache(2**30),
            _cache("1999m", "64Mi"),
            minimal(engine={"kvCache": {}}),
            minimal(engine={"kvCache": {"memory": "40Gi"}}, resources={"memory": "2Gi", "gpu": {}}),
            minimal(engine={"kvCache": {"memory": "40Gi"}}, resources=_PROFILE),
        ),
        "refused": (
            _cache("2Gi"),
            _cache("3Gi"),
            _cache(2**31),
            _cache("0.1Ti", "100Gi"),
            _cache(_HUGE, "64Ti"),
        ),
    },
    "spec#2": {
        "field": "spec.engine",
        "accepted": (
            _tiers(hostOffload="1.5Gi"),
            _tiers(hostOffload=2**30),
            _tiers(memory="1Gi", hostOffload="1023Mi"),
            _tiers(memory=2**30, hostOffload="1999m"),
            minimal(
                engine={"kvCache": {"memory": "40Gi", "hostOffload": "1Gi"}},
                resources={"memory": "2Gi", "gpu": {}},
            ),
        ),
        "refused": (
            _tiers(hostOffload="2Gi"),
            _tiers(hostOffload=2**31),
            _tiers(memory="1Gi", hostOffload="1Gi"),
            _tiers(memory="1.5Gi", hostOffload=2**29),
            _tiers(hostOffload=_HUGE),
            minimal(engine={"kvCache": {"hostOffload": "2Gi"}}, resources={"memory": "2Gi", "gpu": {}}),
        ),
    },
    "spec#3": {
        "field": "spec.engine",
        "accepted": (
            minimal(engine={"enforceEager": True}, resources={"gpu": {}}),
            minimal(engine={"enforceEager": True, "weightOffload": "1Gi"}, resources=_PROFILE),
            minimal(engine={"enforceEager": False}),
        ),
        "refused": (minimal(engine={"enforceEager": True}),),
    },
    "spec#6": {
        "field": "spec.engine",
        "accepted": (_weights("1Gi"), _weights(2**30)),
        "refused": (_weights("1Gi", gpu=False),),
    },
    "spec#7": {
        "field": "spec.engine",
        "accepted": (_weights("1.5Gi"), _weights("1Gi", host_offload="1023Mi"), _weights(2**30)),
        "refused": (
            _weights("2Gi"),
            _weights(2**31),
            _weights("1Gi", host_offload="1Gi"),
            _weights(_HUGE),
        ),
    },
    "spec.engine.weightOffload#0": {
        "field": "spec.engine.weightOffload",
        "accepted": (_weights("1.5Mi"), _weights(1048576)),
        "refused": tuple(_weights(size) for size in _NO_SIZES),
    },
    "spec.engine.kvCache#0": {
        "field": "spec.engine.kvCache.diskOffload",
        "accepted": (_tiers(hostOffload="1Gi", diskOffload="20Gi"),),
        "refused": (_tiers(diskOffload="20Gi"),),
    },
    "spec.engine.kvCache#1": {
        "field": "spec.engine.kvCache.preemptionMode",
        "accepted": (
            _tiers(hostOffload="1Gi", preemptionMode="Swap"),
            _tiers(preemptionMode="Recompute"),
        ),
        "refused": (_tiers(preemptionMode="Swap"),),
    },
    "spec.engine.kvCache.memory#0": {
        "field": "spec.engine.kvCache.memory",
        "accepted": (_cache("1.5Mi"), _cache(1048576), _cache("1M")),
        "refused": tuple(_cache(size) for size in _NO_SIZES),
    },
    "spec.engine.kvCache.hostOffload#0": {
        "field": "spec.engine.kvCache.hostOffload",
        "accepted": (_tiers(hostOffload="1.5Mi"), _tiers(hostOffload=1048576)),
        "refused": tuple(_tiers(hostOffload=size) for size in _NO_SIZES),
    },
    "spec.engine.kvCache.diskOffload#0": {
        "field": "spec.engine.kvCache.diskOffload",
        "accepted": tuple(_tiers(hostOffload="1Gi", diskOffload=size) for size in ("1.5Ti", "64Ti", 2**46)),
        "refused": tuple(
            _tiers(hostOffload="1Gi", diskOffload=size)
            for size in (*_NO_SIZES, _HUGE, "64.001Ti", 2**46 + 1, 2**63 - 1)
        ),
    },
    "spec.engine.speculation#0": {
        "field": "spec.engine.speculation.draftModelPath",
        "accepted": (
            _drafts(),
            _drafts(method="NGram", numTokens=8),
            _drafts(method="DraftModel", draftModelPath="llama/1b"),
            _drafts(method="None", draftModelPath=""),
        ),
        "refused": (
            _drafts(method="DraftModel"),
            _drafts(method="DraftModel", draftModelPath=""),
            _drafts(method="NGram", draftModelPath="llama/1b"),
            _drafts(draftModelPath="llama/1b"),
        ),
    },
    "spec.engine.speculation.draftModelPath#0": {
        "field": "spec.engine.speculation.draftModelPath",
        "accepted": (
            _drafts(method="DraftModel", draftModelPath="."),
            _drafts(method="DraftModel", draftModelPath="a/..b"),
        ),
        "refused": tuple(
            _drafts(method="DraftModel", draftModelPath=path) for path in ("/a", "..", "a/../../b")
        ),
    },
}
