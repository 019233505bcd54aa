"""``kubectl quire size --together`` as text: what each of several models needs of one accelerator, and
whether the sum is within it.

Pure; the arithmetic is ``quire_sizing``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire_sizing import memory
from quire_sizing.memory import Accelerator, Need, Serving, Together, Verdict
from quire_sizing.model import ModelShape


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Models on one accelerator. `name`: of its profile, empty for a memory that was given; `needs`: what
    each takes there, since a larger accelerator computes more tokens in a step.
    """

    name: str
    accelerator: Accelerator
    needs: Mapping[str, Need]
    verdict: Together


def place(models: Mapping[str, ModelShape], name: str, accelerator: Accelerator, serving: Serving) -> Placed:
    """Whether the models fit. Raises SizingError for invalid limits."""
    needs = {model: memory.need(shape, accelerator, serving) for model, shape in models.items()}
    verdict = memory.fits_together(list(needs.values()), accelerator, serving)
    return Placed(name=name, accelerator=accelerator, needs=needs, verdict=verdict)


def largest(placed: Sequence[Placed]) -> Placed:
    """The accelerator on which models take most."""
    return max(placed, key=lambda one: one.accelerator.memory)


def text(placed: Sequence[Placed], serving: Serving, notes: Sequence[str]) -> str:
    """A table of what each model takes, on the largest accelerator, and a verdict for each accelerator."""
    needs = largest(placed).needs
    heads = {"WEIGHTS": [need.weights for need in needs.values()]}
    if serving.max_adapters:
        heads["ADAPTERS"] = [need.adapters for need in needs.values()]
    heads |= {
        "WORKING": [need.workspace for need in needs.values()],
        "KV, ONE REQUEST": [need.request for need in needs.values()],
        f"KV, {serving.max_num_seqs}": [need.requests for need in needs.values()],
    }
    rows: list[Sequence[str]] = [("MODEL", *heads)]
    rows += [(name, *map(_gb, counts)) for name, *counts in zip(needs, *heads.values(), strict=True)]
    lines = [*columns(rows), ""]
    for one in placed:
        verdict = _verdict(one.needs, one.accelerator, one.verdict, serving)
        lines.append(f"{one.name}: {verdict}" if one.name else verdict)
    return "\n".join([*lines, *(f"Note: {line}" for line in notes)])


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _verdict(needs: Mapping[str, Need], accelerator: Accelerator, verdict: Together, serving: Serving) -> str:
    limit = f"{_gb(verdict.usable)} ({serving.utilization:.0%} of {_gb(accelerator.memory)})"
    if verdict.verdict is Verdict.NOTHING:
        return (
            f"Does not fit together: one request of each needs {_gb(verdict.least)}, and {limit} may be "
            f"used. "
            "Take fewer bits or a shorter --max-model-len, or let them run in turns (spec.sharing)."
        )
    if verdict.verdict is Verdict.FITS:
        shares = _percents({name: need.most for name, need in needs.items()}, accelerator)
        return f"Fits together: all requests of each need {_gb(verdict.most)} of {limit}. {shares}"
    shares = _percents({name: need.least for name, need in needs.items()}, accelerator)
    return (
        f"Fits together with fewer requests at once: one of each needs {_gb(verdict.least)}, all of them "
        f"{_gb(verdict.most)}, of {limit}. {shares}"
    )


def _percents(bytes_of: Mapping[str, int], accelerator: Accelerator) -> str:
    """The share that each is to be given."""
    shares = [f"{name} {math.ceil(100 * count / accelerator.memory)}" for name, count in bytes_of.items()]
    return f"memoryPercent at least: {', '.join(shares)}."


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
