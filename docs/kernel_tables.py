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
_HEAD = """
| launch config | registers | shared, KiB | blocks per SM | tensor cores | 128-bit accesses | also for |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The page with its tables regenerated."""
    rows = json.loads(TABLE.read_text())
    return _MARKED.sub(
        lambda found: f"{found[1]}{_table(rows, found['start'])}\n{found[3]}", PAGE.read_text()
    )


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


def _line(row: dict[str, Any], others: list[str]) -> str:
    accesses = ", ".join(
        f"{row[kind]} {word}"
        for kind, word in (("load128", "loads"), ("async128", "asynchronous"), ("store128", "stores"))
        if row[kind]
    )
    cores = f"{row['mma']} {'HGMMA' if row['wgmma'] else 'HMMA'}" if row["mma"] else ""
    cells = (row["name"], row["registers"], f"{row['shared'] / 1024:.1f}", row["blocks"], cores, accesses)
    return "| " + " | ".join(str(cell) for cell in (*cells, ", ".join(others))) + " |\n"
