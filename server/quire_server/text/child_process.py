"""A child process that processes untrusted text (a model's chat template, a client's JSON schema), so that it
cannot block or crash the API process.

Requests and responses are JSON objects, one per line. The child limits its own time and memory
(``child_loop``); when it exceeds them and dies, the current request fails and the next one starts a new
child.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

OVER_LIMITS = {"error": "it takes too long, or too much memory."}


class ChildProcess:
    """Thread-safe; one request at a time. The process starts with the first request."""

    def __init__(self, module: str, setup: Mapping[str, Any]) -> None:
        self._module = module
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The response to a request, or to the setup when there is none. Blocks."""
        with self._lock:
            try:
                if self._process is not None and self._process.poll() is not None:
                    self._stop()  # ended between requests (for example out of memory)
                if self._process is None:
                    self._process = _spawn(self._module)
                    response = _exchange(self._process, self._setup)
                    if "error" in response:
                        self._stop()  # or it would take the next request for the setup
                    if request is None or "error" in response:
                        return response
                assert request is not None
                return _exchange(self._process, request)
            except (EOFError, BrokenPipeError):
                self._stop()
                return dict(OVER_LIMITS)
            except BaseException:
                self._stop()  # interrupted between request and response: the pipe is out of sync
                raise

    def close(self) -> None:
        """End the child process. (It also ends when this process does.)"""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _spawn(module: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: never import modules from the current directory, which may be a model's.
        [sys.executable, "-Pm", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _exchange(process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    response: dict[str, Any] = json.loads(line)
    return response
