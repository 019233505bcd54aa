"""Generates the tables of docs/kernels.md from bench/results/aot.json, which `python -m bench.aot` writes.

The text between the tables is written by hand, in the page itself.
"""

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("kernels.md")
TABLE = PAGE.parents[1] / "bench" / "results" / "aot.json"
_MARKED = re.compile(r"(<!-- table: (?P<start>[\w ,]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SERVING = re.compile(r"(<!-- serving keys -->\n).*?(<!-- end -->)", re.DOTALL)
_GPUS = (80, 86, 89, 90, 100, 120)
_SERVING_NAME = re.compile(r"serving (\w+?)(?:_kernel)?:")
_HEAD = """
| launch config | registers | shared, KiB | blocks per SM | tensor cores | 128-bit accesses | also for |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The page with its tables regenerated."""
    rows = json.loads(TABLE.read_text())
    tables = _MARKED.sub(
        lambda found: f"{found[1]}{_table(rows, found['start'])}\n{found[3]}", PAGE.read_text()
    )
    return _SERVING.sub(lambda found: f"{found[1]}{_serving(rows)}\n{found[2]}", tables)


def _table(rows: list[dict[str, Any]], start: str) -> str:
    chosen = [row for row in rows if row["name"].startswith(start)]
    if not chosen:
        raise ValueError(f"docs/kernels.md: no kernel's name starts with {start!r}")
    others: dict[str, list[str]] = {}
    for row in chosen:
        others.setdefault(row["name"], [])
        if row["gpu"] != 90:
            others[row["name"]].append(f"sm_{row['gpu']}")
    return _HEAD + "".join(_line(row, others[row["name"]]) for row in chosen if row["gpu"] == 90)


def _serving(rows: list[dict[str, Any]]) -> str:
    """Of each kernel the most that any key takes: registers, KiB, and the fewest programs per SM."""
    kernels: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for row in rows:
        if found := _SERVING_NAME.match(row["name"]):
            kernels.setdefault(found[1], {}).setdefault(row["gpu"], []).append(row)
    lines = ["", "| kernel | keys | " + " | ".join(f"sm_{gpu}" for gpu in _GPUS) + " |", "|---" * 8 + "|"]
    for name, by_gpu in kernels.items():
        keys = max(map(len, by_gpu.values()))
        cells = [_most(by_gpu[gpu]) if gpu in by_gpu else "" for gpu in _GPUS]
        lines.append("| " + " | ".join((name, str(keys), *cells)) + " |")
    return "\n".join(lines) + "\n"


def _most(rows: list[dict[str, Any]]) -> str:
    registers, shared = (max(row[what] for row in rows) for what in ("registers", "shared"))
    return f"{registers} / {shared / 1024:.1f} / {min(row['blocks'] for row in rows)}"


def _line(row: dict[str, Any], others: list[str]) -> str:
    accesses = ", ".join(
        f"{row[kind]} {word}"
        for kind, word in (("load128", "loads"), ("async128", "asynchronous"), ("store128", "stores"))
        if row[kind]
    )
    cores = f"{row['mma']} {'HGMMA' if row['wgmma'] else 'HMMA'}" if row["mma"] else ""
    cells = (row["name"], row["registers"], f"{row['shared'] / 1024:.1f}", row["blocks"], cores, accesses)
    return "| " + " | ".join(str(cell) for cell in (*cells, ", ".join(others))) + " |\n"
