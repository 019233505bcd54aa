"""Runs a long program and shows its progress: its milestones and its last line.

What it printed is shown in full only when it failed.
"""

import queue
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from e2e.images.errors import ImageError
from e2e.progress import Progress

_KEPT_LINES = 60


def run(what: str, argv: Sequence[str], *, milestones: str = "$^", cwd: Path | None = None) -> None:
    """Runs `argv`; prints lines that match `milestones`, and the last line as its progress."""
    began = time.monotonic()
    milestone = re.compile(milestones)
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    process = subprocess.Popen(
        argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines, status = _lines(process), Progress()
    while True:
        line = _next(lines, status.seconds)
        if line is None:
            break
        if line:
            last.append(line)
        state = f"{what} {time.monotonic() - began:4.0f} s  {(last or [''])[-1].strip()[:110]}"
        if milestone.search(line):
            status.keep(f"  {state}")
        else:
            status.update(state)
    status.end()
    if process.returncode != 0:
        raise ImageError(f"{what}: `{' '.join(argv[:2])}` ended with {process.returncode}:\n{''.join(last)}")


def _lines(process: subprocess.Popen[str]) -> "queue.Queue[str | None]":
    """What the process prints, line by line, then None: a queue, because a read has no time limit."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _next(lines: "queue.Queue[str | None]", seconds: float) -> str | None:
    """The next line; empty when none came for so long."""
    try:
        return lines.get(timeout=seconds)
    except queue.Empty:
        return ""


def succeeds(argv: Sequence[str]) -> bool:
    """Whether a quick program ends with 0."""
    return subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0


def output(argv: Sequence[str]) -> str:
    """What a quick program prints."""
    done = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, text=True)
    if done.returncode != 0:
        raise ImageError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout.strip()
