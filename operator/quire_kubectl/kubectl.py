"""kubectl as a child process, so that the plugin has the user's own login and rights.

Arguments are passed as a list, never through a shell. The only module of this package that starts a process.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

LLM_DEPLOYMENTS = "llmdeployments.serving.quire.dev"
_WATCH_AGAIN_SECONDS = 1.0
PATIENCE_SECONDS = 120.0  # enough for a restart of the API server
Document = dict[str, Any]
# klog's lines repeat, for each attempt, what kubectl says in its last line.
_KLOG = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ ")


class KubectlError(Exception):
    """kubectl failed; the message is what it said, in one line."""


def run(arguments: Sequence[str], given: str | None = None) -> str:
    """The output of kubectl. `given`: its standard input."""
    try:
        ended = subprocess.run(
            ["kubectl", *arguments],
            capture_output=True,
            text=True,
            check=False,
            input=given,
            errors="replace",
        )
    except OSError as error:
        raise KubectlError(f"kubectl cannot be started: {error}") from error
    if ended.returncode:
        raise KubectlError(sentence(ended.stderr) or f"kubectl ended with {ended.returncode}")
    return ended.stdout


def sentence(stderr: str) -> str:
    """What kubectl said, in one line, without klog's lines and its own "error:"; its log where it said
    nothing else.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = [line for line in lines if not _KLOG.match(line)]
    return " ".join(said or lines[-1:]).removeprefix("error: ")


def documents(arguments: Sequence[str], given: str | None = None) -> list[Document]:
    """The objects that kubectl prints as JSON; of a list, its items."""
    printed = run([*arguments, "-o", "json"], given)
    return [item for document in _parsed([printed]) for item in document.get("items", [document])]


@contextmanager
def watch(arguments: Sequence[str], patience: float = 0.0) -> Iterator[Iterator[tuple[str, Document]]]:
    """Yields ADDED, MODIFIED or DELETED with the object, starting with all existing objects.

    The API server ends a watch after some time, and kubectl with it: then another is started, which repeats
    all objects. `patience`: seconds for which a watch that has delivered events may fail.
    """
    children: list[subprocess.Popen[str]] = []

    def events() -> Iterator[tuple[str, Document]]:
        until = 0.0
        while True:
            with tempfile.TemporaryFile("w+", errors="replace") as said:
                watching = ["get", *arguments, "-o", "json", "--watch", "--output-watch-events"]
                child = start(watching, stderr=said)
                children[:] = [child]
                assert child.stdout is not None
                for event in _parsed(child.stdout):
                    until = time.monotonic() + patience
                    yield str(event["type"]), event["object"]
                if child.wait() == 0:
                    until = time.monotonic() + patience
                elif time.monotonic() >= until:
                    said.seek(0)
                    raise KubectlError(sentence(said.read()) or f"kubectl ended with {child.returncode}")
            time.sleep(_WATCH_AGAIN_SECONDS)

    try:
        yield events()
    finally:
        for child in children:
            stop(child)


def start(arguments: Sequence[str], stderr: IO[str] | None = None) -> subprocess.Popen[str]:
    """Start kubectl for streaming; its stderr goes to a file or, without one, to the terminal."""
    command = ["kubectl", *arguments]
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace")
    except OSError as error:
        raise KubectlError(f"kubectl cannot be started: {error}") from error


def stop(child: subprocess.Popen[str]) -> None:
    """Terminate it and discard the rest of its output."""
    child.terminate()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _parsed(lines: Iterator[str] | Sequence[str]) -> Iterator[Document]:
    """Parses a sequence of JSON objects without separators."""
    decoder, pending = json.JSONDecoder(), ""
    for line in lines:
        pending = (pending + line).lstrip()
        if line[:1] not in ("{", "}") or not line.rstrip().endswith("}"):
            continue  # an object ends with a line that is complete or has its last brace
        while pending:
            try:
                document, end = decoder.raw_decode(pending)
            except ValueError:
                break
            yield document
            pending = pending[end:].lstrip()
