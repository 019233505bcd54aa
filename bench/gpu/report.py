"""The parts' files as one page of tables. What was not measured says so."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from bench.gpu import (
    expected,
    kernel_tests,
    ledger,
    offload,
    peers,
    roofline,
    serving,
    switches,
    tensor,
    tuning,
)
from bench.gpu.ledger import Ledger, Row
from bench.gpu.place import Place
from bench.gpu.sizes import Sizes

NOT_MEASURED = "*not measured*"


class Part(Protocol):
    """What the module of a part has."""

    @property
    def TITLE(self) -> str:
        """Of its table."""

    @property
    def COLUMNS(self) -> tuple[str, ...]:
        """Of its table, between the row and what is to be reached in it."""

    @property
    def SECONDS(self) -> int:
        """That it may take in one run; all parts together have 25 minutes, and none more than 8."""

    def goals(self, sizes: Sizes) -> dict[str, str]:
        """Every row that there is to be, and what is to be reached in it."""

    def run(self, place: Place, sizes: Sizes, ledger: Ledger) -> None:
        """Measure what is not there."""

    def cells(self, row: Row, rows: dict[str, Row]) -> dict[str, str]:
        """Of COLUMNS, those that a row fills."""


# In the order in which they run: what the tuning finds holds for all after it.
PARTS: Mapping[str, Part] = {
    "expected": expected,
    "tests": kernel_tests,
    "tuning": tuning,
    "kernels": roofline,
    "serving": serving,
    "peers": peers,
    "switches": switches,
    "offload": offload,
    "tensor": tensor,
}

_HEAD = """# On a GPU

Written by `make bench-gpu` ([what it does](../../docs/gpu.md#measuring)). {state}
"""
_NOTHING = "**Nothing in here has been measured: no GPU was at hand.**"


def page(folder: Path, sizes: Sizes) -> str:
    """Markdown, of whatever is there."""
    found = {name: ledger.read(folder / f"{name}.json") for name in PARTS}
    machines = [document["machine"] for document in found.values() if document is not None]
    said = [f"- {key}: {value}" for key, value in machines[0].items()] if machines else []
    lines = [_HEAD.format(state="" if machines else _NOTHING), *said, ""]
    for name, part in PARTS.items():
        document = found[name]
        lines += _table(part, {} if document is None else document["rows"], sizes)
    return "\n".join(lines)


def _table(part: Part, rows: dict[str, Row], sizes: Sizes) -> list[str]:
    lines = [f"## {part.TITLE}", "", "| | " + " | ".join((*part.COLUMNS, "to reach")) + " |"]
    lines.append("|---" * (len(part.COLUMNS) + 2) + "|")
    for key, goal in part.goals(sizes).items():
        row = rows.get(key)
        if row is None or "error" in row or "started" in row:
            why = NOT_MEASURED if row is None else f"{NOT_MEASURED}: {row.get('error', 'under way')}"
            cells = {part.COLUMNS[0]: why.replace("|", "/")}
        else:
            cells = part.cells(row, rows)
        lines.append("| " + " | ".join((key, *(cells.get(name, "") for name in part.COLUMNS), goal)) + " |")
    return [*lines, ""]
