"""The kind of output: a terminal with a width and colours, or a file or pipe.

A terminal is redrawn in place; elsewhere each drawing is appended. Knows nothing of the content.
"""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

_COLOURS = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}
PREFIXES = ("cyan", "magenta", "blue", "green", "yellow")
_PAINT = re.compile(r"\x1b\[[0-9;]*m")
_LEAST_WIDTH = 32


@dataclass(frozen=True, kw_only=True)
class Look:
    """`width`: characters of a line, 0 for no limit."""

    width: int = 0
    has_colours: bool = False

    @classmethod
    def of(cls, out: TextIO, environ: Mapping[str, str] = os.environ) -> Look:
        """Colours only for a terminal that supports them, and never with NO_COLOR."""
        if not out.isatty():
            return cls()
        width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns)
        return cls(width=width, has_colours=not environ.get("NO_COLOR") and environ.get("TERM") != "dumb")

    def paint(self, text: str, colour: str) -> str:
        """`text` in a colour, or unchanged."""
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.has_colours and colour else text

    def wrapped(self, text: str, first: str, indent: str) -> list[str]:
        """Lines that fit the width, the first after `first`, the others after `indent`."""
        if not self.width or len(first) + len(text) <= self.width:
            return [first + text]
        return textwrap.wrap(
            text, self.width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
        )

    def cut(self, line: str) -> str:
        """A line without colours, cut to the width."""
        return line if not self.width or len(line) <= self.width else f"{line[: self.width - 1]}~"


class Canvas:
    """Shows one text after another; on a terminal each replaces the one before."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._drawn: list[str] = []

    def show(self, text: str) -> None:
        """Draw `text`, as much of it as fits."""
        if not self._out.isatty() or os.environ.get("TERM") == "dumb":
            self._out.write(f"{text}\n")
            self._out.flush()
            return
        columns, rows = shutil.get_terminal_size()
        lines = text.splitlines()
        if len(lines) >= rows:
            lines = [*lines[: max(1, rows - 2)], f"... and {len(lines) - max(1, rows - 2)} lines more"]
        above = sum(max(1, -(-len(_PAINT.sub("", line)) // columns)) for line in self._drawn)
        up = f"\x1b[{above}A" if above else ""
        self._out.write(f"{up}\r\x1b[J" + "\n".join(lines) + "\n")
        self._out.flush()
        self._drawn = lines
