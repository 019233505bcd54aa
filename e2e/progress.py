"""How a long step shows its progress: one line, rewritten every second on a terminal, else one each 10 s.

For what takes minutes: compiling programs, building and pushing images, waiting for pods. A line of progress
begins with two spaces, by which a parent process distinguishes it from a line that stays.
"""

import os
import shutil
import sys
import time
from typing import TextIO

# Set for the child processes whose lines the parent shows in its own status line.
SECONDS_VARIABLE = "QUIRE_PROGRESS_SECONDS"
INDENT = "  "
_TERMINAL_SECONDS = 1.0
_LOG_SECONDS = 10.0
_CLEAR = "\r\x1b[K"


class Progress:
    """The status line of one step. `update` may be called as often as one likes."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._is_terminal = self._out.isatty()
        default = _TERMINAL_SECONDS if self._is_terminal else _LOG_SECONDS
        self.seconds = float(os.environ.get(SECONDS_VARIABLE, default))
        self._shown_at = time.monotonic()
        self._is_drawn = False

    def update(self, text: str) -> None:
        """Shows `text` as the state of the step, unless the last state was shown a moment ago."""
        if time.monotonic() - self._shown_at < self.seconds:
            return
        self._shown_at = time.monotonic()
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"{_CLEAR}{(INDENT + text)[:width]}")
            self._is_drawn = True
        else:
            self._write(f"{INDENT}{text}\n")

    def keep(self, line: str) -> None:
        """Prints a line that stays, above the status line."""
        self.end()
        self._write(f"{line}\n")

    def end(self) -> None:
        """Removes the status line."""
        if self._is_drawn:
            self._write(_CLEAR)
            self._is_drawn = False

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
