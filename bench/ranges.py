"""How far apart the runs of one section of ``bench.cpu`` lie: python -m bench.ranges

The speed of a machine changes from hour to hour. ``bench.cpu`` keeps the table of every run of the sections
in RANGED, and from them this writes bench/results/cpu_ranges.md: the same tables, with the lowest and the
highest number of each cell. Tables of different machines or versions are not mixed.
"""

import datetime
import re
from collections.abc import Sequence
from pathlib import Path

RANGED = ("decode", "decode-sampled", "decode-schema", "arrivals", "int4", "int4-1b", "int4-http")
RESULTS = Path(__file__).parent / "results"
RUNS = RESULTS / "cpu" / "runs"
NUMBER = re.compile(r"\d+(\.\d+)?")


def keep(section: str, text: str) -> None:
    """The table of a run that ends now."""
    folder = RUNS / section
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    (folder / f"{now:%Y-%m-%dT%H%M}.md").write_text(text)


def merged(texts: Sequence[str]) -> str:
    """Of tables of one form: every cell but those of the first column, from its lowest to its highest first
    number. What is not a table is left out, but for the heading and the last line.
    """
    heading, machine = texts[0].splitlines()[0], texts[0].rstrip().splitlines()[-1]
    rows = [[_cells(line) for line in text.splitlines() if line.startswith("|")] for text in texts]
    if any(_names(one) != _names(rows[0]) for one in rows):
        raise ValueError(f"{heading}: runs differ in their rows or columns. Delete those of another version.")
    table = []
    for lines in zip(*rows, strict=True):
        if lines[0][0].startswith("---") or lines[0] == rows[0][0]:
            table.append(lines[0])
            continue
        table.append([lines[0][0], *map(_range, zip(*(line[1:] for line in lines), strict=True))])
    return "\n".join([heading, "", *(f"| {' | '.join(cells)} |" for cells in table), "", machine, ""])


def _names(rows: Sequence[Sequence[str]]) -> tuple[Sequence[Sequence[str]], Sequence[tuple[str, int]]]:
    """The columns, and each row's name with its number of cells."""
    return rows[:1], [(row[0], len(row)) for row in rows]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _range(cells: Sequence[str]) -> str:
    found = [match for cell in cells if (match := NUMBER.search(cell))]
    if not found:
        return cells[0]
    numbers = sorted((match[0] for match in found), key=float)
    unit = "x" if cells[0].endswith("x") else ""
    low, high = numbers[0], numbers[-1]
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def report() -> str:
    """All sections, each with the hours of its runs."""
    parts = [
        "# Ranges over several hours\n",
        "Lowest and highest of the runs named under each table; rates are medians of a run, without its best "
        "step.\n",
    ]
    for section in RANGED:
        groups: dict[str, list[tuple[str, str]]] = {}
        for path in sorted((RUNS / section).glob("*.md")):
            text = path.read_text()
            if not text.startswith("## "):
                raise ValueError(f"{path} is no table of a run. Delete it.")
            groups.setdefault(text.rstrip().splitlines()[-1], []).append((path.stem, text))
        for runs in groups.values():
            times = ", ".join(stem for stem, _ in runs)
            parts.append(f"{merged([text for _, text in runs])}\nRuns that ended at {times} (UTC).\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (RESULTS / "cpu_ranges.md").write_text(report())
