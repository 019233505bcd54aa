"""Runs programs side by side and shows every line with the name of who said it and the time since the start.

Called by `flow` for what takes minutes on a new machine: the cluster's programs, the images, the model.
"""

import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2e.up.errors import UpError


def run(programs: Mapping[str, Sequence[str]], cwd: Path) -> None:
    """Returns when all have ended well; the first that fails ends the others."""
    began = time.monotonic()
    width = max(map(len, programs))
    running = {
        name: subprocess.Popen(
            argv,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, argv in programs.items()
    }
    failed: list[str] = []

    def follow(name: str, process: subprocess.Popen[str]) -> None:
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                print(f"  [{name:<{width}} {time.monotonic() - began:4.0f} s] {line.rstrip()}", flush=True)
        if process.returncode != 0:
            failed.append(name)
            for other in running.values():
                other.terminate()

    threads = [threading.Thread(target=follow, args=item) for item in running.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise UpError(
            f"{failed[0]} failed, see the lines above; `make up` goes on from here when it is mended"
        )
