"""A child process for work that an untrusted text may turn against us: it can be ended, we cannot.

Used by ``chat`` (a model's template) and ``grammar_compiler`` (a client's schema), both in the API process.
One JSON object a line each way. The child limits its own time and memory (``child_loop``); when it dies over
them, this question fails and the next one gets a new child.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

OVER_LIMITS = {"error": "it takes too long, or too much memory."}


class Child:
    """Safe to share between threads; one question at a time. The process starts with the first question."""

    def __init__(self, module: str, setup: Mapping[str, Any]) -> None:
        self._module = module
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a question, or to the setup when there is none. Blocks."""
        with self._lock:
            try:
                if self._process is not None and self._process.poll() is not None:
                    self._stop()  # ended while nobody asked (out of memory, say): not this question's fault
                if self._process is None:
                    self._process = _spawn(self._module)
                    answer = _exchange(self._process, self._setup)
                    if "error" in answer:
                        self._stop()  # or it would take the next question for a setup
                    if question is None or "error" in answer:
                        return answer
                assert question is not None
                return _exchange(self._process, question)
            except (EOFError, BrokenPipeError):
                self._stop()
                return dict(OVER_LIMITS)
            except BaseException:
                self._stop()  # interrupted between question and answer: the pipe is out of step
                raise

    def close(self) -> None:
        """End the child. (It also ends by itself when this process does.)"""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _spawn(module: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: the current directory (a model's, perhaps) holds no modules of ours.
        [sys.executable, "-Pm", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _exchange(process: subprocess.Popen[bytes], question: Mapping[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(question).encode() + b"\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    answer: dict[str, Any] = json.loads(line)
    return answer
