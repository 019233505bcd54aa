"""Runs programs side by side: lasting lines are printed with the program's name, the rest is one status line.

For what takes minutes on a new machine: the cluster's programs, the images, the model.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from e2e import progress
from e2e.progress import Progress
from e2e.up.errors import UpError


def run(programs: Mapping[str, Sequence[str]], cwd: Path) -> None:
    """Returns when all have ended well; the first that fails, or an interruption, ends the others."""
    began = time.monotonic()
    running = {name: _start(argv, cwd) for name, argv in programs.items()}
    status, lock = Progress(), threading.Lock()
    states = dict.fromkeys(programs, "started")
    failed: list[str] = []
    interrupted = threading.Event()

    def follow(name: str, process: subprocess.Popen[str]) -> None:
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                with lock:
                    if interrupted.is_set():
                        continue  # how they end then is no news
                    if line.startswith(progress.INDENT):
                        states[name] = line.strip()
                    else:
                        status.keep(f"  [{name} {time.monotonic() - began:.0f} s] {line.rstrip()}")
        with lock:
            del states[name]
            if process.returncode != 0:
                failed.append(name)
                for other in running.values():
                    other.terminate()

    threads = [threading.Thread(target=follow, args=item) for item in running.items()]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(min(status.seconds, 1.0))
                with lock:
                    status.update(_line(time.monotonic() - began, states))
    except KeyboardInterrupt:
        interrupted.set()
        for process in running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        for thread in threads:
            thread.join()
        raise
    finally:
        status.end()
    if failed:
        raise UpError(f"{failed[0]} failed, see the lines above; `make up` continues here once it is fixed")


def _start(argv: Sequence[str], cwd: Path) -> subprocess.Popen[str]:
    """In a group of its own: Ctrl-C reaches it from here, after which its last words are not shown."""
    return subprocess.Popen(
        argv,
        cwd=cwd,
        env={**os.environ, progress.SECONDS_VARIABLE: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def _line(seconds: float, states: Mapping[str, str]) -> str:
    """Time since the start, then what each program does; each gets the same share of a terminal's line."""
    share = max(20, 100 // max(1, len(states)))
    return "  |  ".join([f"{seconds:.0f} s", *(f"{name}: {state}"[:share] for name, state in states.items())])
