"""Runs a long program so that a person sees it move: its milestones, a line every few seconds, its end.

Used by `base` and `tools`. What a program said is shown in full only when it failed.
"""

import re
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from e2e.images.errors import ImageError

_SILENCE_SECONDS = 5
_KEPT_LINES = 60


def run(what: str, argv: Sequence[str], *, milestones: str = "$^", cwd: Path | None = None) -> None:
    """Runs `argv`; prints lines that match `milestones`, and the last line every 5 s."""
    began = shown = time.monotonic()
    milestone = re.compile(milestones)
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    process = subprocess.Popen(
        argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        last.append(line)
        now = time.monotonic()
        if milestone.search(line) or now - shown >= _SILENCE_SECONDS:
            print(f"  {what} {now - began:4.0f} s  {line.strip()[:110]}", flush=True)
            shown = now
    if process.wait() != 0:
        raise ImageError(f"{what}: `{' '.join(argv[:2])}` ended with {process.returncode}:\n{''.join(last)}")


def succeeds(argv: Sequence[str]) -> bool:
    """Whether a quick program ends with 0."""
    return subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0


def output(argv: Sequence[str]) -> str:
    """What a quick program prints."""
    done = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, text=True)
    if done.returncode != 0:
        raise ImageError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout.strip()
