"""kubectl as a child process: whoever may use kubectl may use the plugin, with the same login.

Called by the commands. Arguments are passed as they are, never through a shell; the one room of this package
that starts a process.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_KIND = "llmdeployments.serving.quire.dev"
_CHUNK = 1 << 16
Document = dict[str, Any]


class KubectlError(Exception):
    """kubectl failed; the message is what it said."""


def get(name: str | None, arguments: Sequence[str]) -> Document:
    """An LLMDeployment, or the list of all where no name is given."""
    command = [*_command(name, arguments), "-o", "json"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise KubectlError(f"kubectl cannot be started: {error}") from error
    if ended.returncode:
        raise KubectlError(ended.stderr.strip() or f"kubectl ended with {ended.returncode}")
    document: Document = json.loads(ended.stdout)
    return document


@contextmanager
def watch(name: str | None, arguments: Sequence[str]) -> Iterator[Iterator[Document]]:
    """The same, and again whenever one changes, until kubectl ends; it is ended on leaving."""
    command = [*_command(name, arguments), "-o", "json", "--watch"]
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise KubectlError(f"kubectl cannot be started: {error}") from error
    with child:
        try:
            yield _documents(child)
        finally:
            child.terminate()


def _command(name: str | None, arguments: Sequence[str]) -> list[str]:
    return ["kubectl", "get", _KIND, *([name] if name else []), *arguments]


def _documents(child: subprocess.Popen[str]) -> Iterator[Document]:
    """JSON objects one after the other, without anything between them to go by."""
    assert child.stdout is not None
    decoder, pending = json.JSONDecoder(), ""
    for line in child.stdout:
        pending = (pending + line).lstrip()
        if not line.startswith("}"):
            continue  # the end of an object stands at the beginning of a line
        while pending:
            try:
                document, end = decoder.raw_decode(pending)
            except ValueError:
                break
            yield document
            pending = pending[end:].lstrip()
    if child.wait():
        raise KubectlError(f"kubectl ended with {child.returncode}; what it said stands above")
