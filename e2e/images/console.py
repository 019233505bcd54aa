"""Runs a long program so that a person sees it move: its milestones, a line every few seconds, its end.

Used by `base` and `tools`. What a program said is shown in full only when it failed.
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

_SILENCE_SECONDS = 5
_KEPT_LINES = 60


def run(what: str, argv: Sequence[str], *, milestones: str = "$^", cwd: Path | None = None) -> None:
    """Runs `argv`; prints lines that match `milestones`, and after 5 s of silence the last line."""
    began = shown = time.monotonic()
    milestone = re.compile(milestones)
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    process = subprocess.Popen(
        argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = _lines(process)
    while True:
        line = _next(lines)
        if line is None:
            break
        if line:
            last.append(line)
        now = time.monotonic()
        if milestone.search(line) or now - shown >= _SILENCE_SECONDS:
            print(f"  {what} {now - began:4.0f} s  {(last or [''])[-1].strip()[:110]}", flush=True)
            shown = now
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


def _next(lines: "queue.Queue[str | None]") -> str | None:
    try:
        return lines.get(timeout=_SILENCE_SECONDS)
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
