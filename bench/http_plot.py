"""Latency percentiles as an SVG: one row per quantity, on a logarithmic axis (used by
``bench.http_overhead``). The lock files have no plotting library.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

SHARES = (0.5, 0.9, 0.95, 0.99)
_COLOURS = ("#1b5e8c", "#3d8fc4", "#e0902f", "#b8382f")
_LEFT, _RIGHT, _TOP, _ROW, _WIDTH = 340, 70, 50, 44, 960


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not less than this share of them."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def percentiles(latencies: Mapping[str, Sequence[float]]) -> str:
    """An SVG document of latencies in milliseconds."""
    found = {label: [quantile(values, share) for share in SHARES] for label, values in latencies.items()}
    everything = [value for row in found.values() for value in row]
    low, high = math.floor(math.log10(min(everything))), math.ceil(math.log10(max(everything)))

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log10(value) - low) / (high - low)

    height = _TOP + _ROW * len(found) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_legend(),
        *_axis(low, high, x, height),
    ]
    for number, (label, values) in enumerate(found.items()):
        parts += _row(label, [(x(value), value) for value in values], _TOP + _ROW * number + _ROW // 2)
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> list[str]:
    parts: list[str] = []
    for number, (share, colour) in enumerate(zip(SHARES, _COLOURS, strict=True)):
        at = _LEFT + 80 * number
        parts.append(f'<circle cx="{at + 6}" cy="20" r="6" fill="{colour}"/>')
        parts.append(_text(at + 18, 25, f"p{100 * share:g}"))
    return parts


def _axis(low: int, high: int, x: Callable[[float], float], height: int) -> list[str]:
    parts: list[str] = []
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line x1="{at:.0f}" x2="{at:.0f}" y1="{_TOP}" y2="{height - 36}" stroke="#ddd"/>')
        parts.append(_text(at, height - 16, f"{10.0**power:g} ms", anchor="middle"))
    return parts


def _row(label: str, points: list[tuple[float, float]], y: int) -> list[str]:
    first, last = points[0], points[-1]
    parts = [
        _text(_LEFT - 12, y + 5, label, anchor="end"),
        f'<line x1="{first[0]:.0f}" x2="{last[0]:.0f}" y1="{y}" y2="{y}" stroke="#999" stroke-width="2"/>',
    ]
    for (at, _), colour in reversed(list(zip(points, _COLOURS, strict=True))):
        parts.append(f'<circle cx="{at:.1f}" cy="{y}" r="6" fill="{colour}"/>')
    parts.append(_text(first[0] - 10, y + 5, _figure(first[1]), anchor="end"))
    parts.append(_text(last[0] + 10, y + 5, _figure(last[1])))
    return parts


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="14" fill="#333">{escape(text)}</text>'
