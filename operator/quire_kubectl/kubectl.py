"""kubectl as a child process: whoever may use kubectl may use the plugin, with the same login.

Called by the commands. Arguments are passed as they are, never through a shell; the one room of this package
that starts a process.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LLM_DEPLOYMENTS = "llmdeployments.serving.quire.dev"
_WATCH_AGAIN_SECONDS = 1.0
PATIENCE_SECONDS = 120.0  # an API server that is restarted is back by then
Document = dict[str, Any]


class KubectlError(Exception):
    """kubectl failed; the message is what it said."""


def run(arguments: Sequence[str], given: str | None = None) -> str:
    """What kubectl prints. `given`: its standard input."""
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
        raise KubectlError(ended.stderr.strip() or f"kubectl ended with {ended.returncode}")
    return ended.stdout


def documents(arguments: Sequence[str], given: str | None = None) -> list[Document]:
    """The objects that kubectl prints as JSON, those of a list one by one."""
    printed = run([*arguments, "-o", "json"], given)
    return [item for document in _parsed([printed]) for item in document.get("items", [document])]


@contextmanager
def watch(arguments: Sequence[str], patience: float = 0.0) -> Iterator[Iterator[tuple[str, Document]]]:
    """ADDED, MODIFIED or DELETED and the object, first of all that `kubectl get` finds. The API server ends a
    watch after some time and kubectl with it: then another begins, and tells again of all that is there.
    `patience`: for so many seconds a watch that has told of something may fail.
    """
    children: list[subprocess.Popen[str]] = []

    def told() -> Iterator[tuple[str, Document]]:
        until = 0.0
        while True:
            child = start(["get", *arguments, "-o", "json", "--watch", "--output-watch-events"])
            children[:] = [child]
            assert child.stdout is not None
            for event in _parsed(child.stdout):
                until = time.monotonic() + patience
                yield str(event["type"]), event["object"]
            if child.wait() == 0:
                until = time.monotonic() + patience
            elif time.monotonic() >= until:
                raise KubectlError(f"kubectl ended with {child.returncode}; what it said stands above")
            time.sleep(_WATCH_AGAIN_SECONDS)

    try:
        yield told()
    finally:
        for child in children:
            stop(child)


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """kubectl, whose output is to be read as it comes; what it says on stderr everybody sees."""
    try:
        return subprocess.Popen(["kubectl", *arguments], stdout=subprocess.PIPE, text=True, errors="replace")
    except OSError as error:
        raise KubectlError(f"kubectl cannot be started: {error}") from error


def stop(child: subprocess.Popen[str]) -> None:
    """End it, whatever it still has to say."""
    child.terminate()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _parsed(lines: Iterator[str] | Sequence[str]) -> Iterator[Document]:
    """JSON objects one after the other, without anything between them to go by."""
    decoder, pending = json.JSONDecoder(), ""
    for line in lines:
        pending = (pending + line).lstrip()
        if line[:1] not in ("{", "}") or not line.rstrip().endswith("}"):
            continue  # an object ends with a line that is all of it, or its last brace
        while pending:
            try:
                document, end = decoder.raw_decode(pending)
            except ValueError:
                break
            yield document
            pending = pending[end:].lstrip()
