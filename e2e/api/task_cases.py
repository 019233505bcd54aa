"""Accepted and refused objects for the rules of `task`. Part of `cases`."""

from __future__ import annotations

from typing import Any

from e2e.api.specs import Body, minimal


def _embed(**fields: Any) -> Body:
    return minimal(task="Embed", **fields)


def _engine(**fields: Any) -> tuple[Body, Body]:
    """The same engine of a model that generates text, and of one that embeds it."""
    return minimal(engine=fields), _embed(engine=fields)


_ENGINES = (
    _engine(speculation={"method": "NGram"}),
    _engine(watermark={"mode": "Always", "keySecretRef": {"name": "w", "key": "k"}}),
    _engine(chatTemplate={"file": "tools.jinja"}),
    _engine(toolCallParser="Hermes"),
    _engine(reasoningParser="None"),
)
_CACHES = (
    _engine(kvCache={"memory": "1Gi"}),
    _engine(kvCache={"dtype": "Int8"}),
    _engine(kvCache={"blockSize": 32}),
    _engine(kvCache={"hostOffload": "1Gi"}),
)
_ON_GPU: Any = {"resources": {"cpu": "2", "memory": "16Gi", "gpu": {}}}

# By rule: the arguments of `cases.Cases`.
TASK_CASES: dict[str, dict[str, Any]] = {
    "spec#31": {
        "field": "spec.disaggregation",
        "accepted": (_embed(), minimal(disaggregation={"prefill": {}})),
        "refused": (_embed(disaggregation={"prefill": {}}),),
    },
    "spec#32": {
        "field": "spec.parallelism",
        "accepted": (_embed(parallelism={"tensor": 1}), minimal(parallelism={"tensor": 2})),
        "refused": (_embed(parallelism={"tensor": 2}), _embed(parallelism={"pipeline": 2})),
    },
    "spec#33": {
        "field": "spec.engine",
        "accepted": (*(one for one, _ in _CACHES), _embed(engine={"kvCache": {"dtype": "Auto"}})),
        "refused": tuple(other for _, other in _CACHES),
    },
    "spec#34": {
        "field": "spec.engine",
        "accepted": (*(one for one, _ in _ENGINES), _embed(engine={"maxModelLen": 512, "dtype": "Float32"})),
        "refused": (
            *(other for _, other in _ENGINES),
            _embed(engine={"weightOffload": "1Gi"}, **_ON_GPU),
            _embed(engine={"maxAdapters": 2}),
        ),
    },
    "spec#35": {
        "field": "spec.engine",
        "accepted": (_embed(engine={"pooling": "Mean"}), minimal(engine={"pooling": "Auto"})),
        "refused": (minimal(engine={"pooling": "Mean"}),),
    },
}
