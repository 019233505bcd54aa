"""Accepted and refused objects for the rules of `parallelism`. Part of `cases`."""

from __future__ import annotations

from typing import Any

from e2e.api.specs import Body, minimal


def _ranks(tensor: int, pipeline: int = 1, *, cpu: str = "8", resources: Body | None = None) -> Body:
    sizes = {"tensor": tensor, "pipeline": pipeline}
    return minimal(parallelism=sizes, resources={"cpu": cpu, **(resources or {})})


# By rule: the arguments of `cases.Cases`.
PARALLELISM_CASES: dict[str, dict[str, Any]] = {
    "spec.parallelism#0": {
        "field": "spec.parallelism",
        "accepted": (
            _ranks(7, 2),
            _ranks(1, 14),
            minimal(parallelism={"pipeline": 2}, resources={"cpu": "1"}),
        ),
        "refused": (_ranks(3, 5), _ranks(14, 14)),
    },
    "spec#11": {
        "field": "spec.parallelism",
        "accepted": (
            _ranks(3),
            _ranks(1, 3),
            minimal(parallelism={}, resources={"gpu": {}}),
            _ranks(1, resources={"gpu": {}}),
            _ranks(1, resources={"profileRef": {"name": "h100"}}),
        ),
        "refused": (
            _ranks(2, resources={"gpu": {}}),
            _ranks(1, 2, resources={"gpu": {}}),
            _ranks(2, resources={"profileRef": {"name": "h100"}}),
        ),
    },
    "spec#12": {
        "field": "spec.parallelism",
        "accepted": (
            _ranks(1, cpu="100m"),
            minimal(parallelism={}, resources={"cpu": "100m"}),
            _ranks(2, cpu="1"),
            _ranks(3, cpu="1500m"),
            _ranks(14, cpu="1k"),
            _ranks(3, 2, cpu="3"),
        ),
        "refused": (
            _ranks(2, cpu="0.9"),
            _ranks(1, 2, cpu="0.9"),
            _ranks(3, 2, cpu="2.9"),
            _ranks(3, cpu="1499m"),
            _ranks(14, cpu="6.9"),
        ),
    },
}
