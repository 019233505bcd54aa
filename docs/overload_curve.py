"""Draws docs/overload.svg, and writes the table of docs/overload.md, from bench/results/overload.json, which
`python -m bench.overload` writes.

The text around the table is written by hand, in the page itself. The picture has three panels over one axis,
the offered load: tokens per second, time to the first token, share of refused attempts. No plotting library
is in the lock files, and it needs none.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_name("overload.md")
RESULTS = Path(__file__).parents[1] / "bench" / "results" / "overload.json"
_LEFT, _RIGHT, _WIDTH, _PANEL, _GAP, _TOP = 84, 176, 860, 170, 58, 40
_BLUE, _ORANGE, _RED, _GREY = "#1b5e8c", "#e0902f", "#b8382f", "#767676"

Scale = Callable[[float], float]


class Line(NamedTuple):
    """One curve, with its name at its right end."""

    name: str
    values: Sequence[float]
    colour: str
    is_dashed: bool = False


_MARKED = re.compile(r"(<!-- table: overload -->\n).*?(<!-- end -->)", re.DOTALL)
_COLUMNS = (
    "offered load",
    "requests/s",
    "goodput, tok/s",
    "of its peak",
    "TTFT p50, p99, ms",
    "refused attempts",
    "p99 until refused, ms",
    "preemptions, answers",
)
_HEAD = f"\n| {' | '.join(_COLUMNS)} |\n|{'---:|' * len(_COLUMNS)}\n"


def page() -> str:
    """docs/overload.md with its table regenerated."""
    results = json.loads(RESULTS.read_text())
    peak = max(phase["goodput"] for phase in results["phases"])
    rows = "".join(
        f"| {phase['multiple']:g} x | {phase['offered_requests_per_second']:.1f} | {phase['goodput']:.0f} "
        f"| {phase['goodput'] / peak:.0%} | {phase['ttft_p50_ms']:.0f}, {phase['ttft_p99_ms']:.0f} "
        f"| {phase['shed_share']:.0%} | {phase['shed_p99_ms']:.0f} "
        f"| {phase['preemptions']}, {phase['answers']} |\n"
        for phase in results["phases"]
    )
    return _MARKED.sub(lambda found: f"{found[1]}{_HEAD}{rows}\n{found[2]}", PAGE.read_text())


def picture() -> str:
    """The SVG document."""
    results = json.loads(RESULTS.read_text())
    phases = results["phases"]
    loads = [phase["multiple"] for phase in phases]

    def of(key: str, factor: float = 1.0) -> list[float]:
        return [factor * phase[key] for phase in phases]

    x = _linear(0.0, max(loads), _LEFT, _WIDTH - _RIGHT)
    goodput = of("goodput")
    floor = [0.9 * max(goodput)] * len(loads)
    most = _round_up(max(of("throughput")))
    times = [*of("ttft_p50_ms"), *of("ttft_p99_ms")]
    decades = range(math.floor(math.log10(min(times))), math.ceil(math.log10(max(times))) + 1)
    panels = [
        (
            "tokens per second",
            [0, most / 4, most / 2, 3 * most / 4, most],
            _linear(0.0, most, _PANEL, 0),
            [
                Line("all answers", of("throughput"), _ORANGE),
                Line("goodput", goodput, _BLUE),
                Line("90 % of its peak", floor, _GREY, is_dashed=True),
            ],
        ),
        (
            "time to the first token, ms",
            [10.0**power for power in decades],
            _logarithmic(10.0 ** decades[0], 10.0 ** decades[-1], _PANEL, 0),
            [Line("p99", of("ttft_p99_ms"), _RED), Line("p50", of("ttft_p50_ms"), _BLUE)],
        ),
        (
            "refused attempts, %",
            [0, 25, 50, 75, 100],
            _linear(0.0, 100.0, _PANEL, 0),
            [Line("503", of("shed_share", 100.0), _RED)],
        ),
    ]
    height = _TOP + len(panels) * (_PANEL + _GAP) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, (title, ticks, y, lines) in enumerate(panels):
        parts.append(f'<g transform="translate(0 {_TOP + number * (_PANEL + _GAP)})">')
        parts += [_text(_LEFT, -14, title, weight="bold"), *_grid(ticks, y, loads, x)]
        parts += _curves(lines, loads, x, y)
        parts.append("</g>")
    axis = "offered load, as a multiple of the load that saturates the replica"
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, height - 12, axis, anchor="middle"))
    return "\n".join([*parts, "</svg>", ""])


def _linear(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (end - start) * (value - low) / (high - low)


def _logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    scale = _linear(math.log10(low), math.log10(high), start, end)
    return lambda value: scale(math.log10(value))


def _round_up(value: float) -> float:
    step: float = 10.0 ** math.floor(math.log10(value)) / 2
    return math.ceil(value / step) * step


def _grid(ticks: Sequence[float], y: Scale, loads: Sequence[float], x: Scale) -> list[str]:
    parts: list[str] = []
    for tick in ticks:
        at = y(tick)
        parts.append(
            f'<line x1="{_LEFT}" x2="{x(loads[-1]):.1f}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>'
        )
        parts.append(_text(_LEFT - 8, at + 5, f"{tick:g}", anchor="end"))
    parts += [_text(x(load), _PANEL + 20, f"{load:g}", anchor="middle") for load in loads]
    return parts


def _curves(lines: Sequence[Line], loads: Sequence[float], x: Scale, y: Scale) -> list[str]:
    parts: list[str] = []
    for line in lines:
        points = " ".join(
            f"{x(load):.1f},{y(value):.1f}" for load, value in zip(loads, line.values, strict=True)
        )
        dashes = ' stroke-dasharray="6 5"' if line.is_dashed else ""
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="2"{dashes}/>'
        )
        if not line.is_dashed:
            parts += [
                f'<circle cx="{x(load):.1f}" cy="{y(value):.1f}" r="4" fill="{line.colour}"/>'
                for load, value in zip(loads, line.values, strict=True)
            ]
    for line, at in zip(lines, _spread([y(line.values[-1]) for line in lines]), strict=True):
        parts.append(_text(x(loads[-1]) + 12, at + 5, line.name, colour=line.colour))
    return parts


def _spread(places: Sequence[float]) -> list[float]:
    """The places of names, moved apart where they would overlap."""
    moved = list(places)
    previous = -math.inf
    for number in sorted(range(len(places)), key=lambda one: places[one]):
        moved[number] = previous = max(places[number], previous + 18)
    return moved


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#333", weight: str = "normal"
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="14" font-weight="{weight}" fill="{colour}">{escape(text)}</text>'
