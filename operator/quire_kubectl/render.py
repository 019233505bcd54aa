"""``kubectl quire render``: the children that the operator would make of an LLMDeployment, as YAML.

Called by ``__main__``. They are made by the operator's own code; what the render rests on goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from typing import TextIO

from quire_kubectl import changes, deployed
from quire_kubectl.kubectl import Document, KubectlError
from quire_operator import spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of one that is stored, or of all in a file."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="of an LLMDeployment that is stored")
    parser.add_argument("-f", "--filename", metavar="FILE", help="a manifest, - for standard input")
    parser.add_argument("-n", "--namespace", help="(default: that of kubectl's context)")


def run(arguments: argparse.Namespace, out: TextIO = sys.stdout) -> int:
    """0: printed. Raises KubectlError, QuireOperatorError."""
    if bool(arguments.name) == bool(arguments.filename):
        raise KubectlError("give a NAME or -f FILE, and not both")
    if arguments.name:
        body = deployed.by_name(arguments.name, arguments.namespace)
        return _print(body, body, out)
    for body in deployed.in_file(arguments.filename, arguments.namespace):
        stored = deployed.stored(body)
        if stored is not None:
            metadata = {**body["metadata"], "uid": stored["metadata"]["uid"]}
            body = {**body, "metadata": metadata, "status": stored.get("status") or {}}
        _print(body, stored, out)
    return 0


def _print(body: Document, stored: Document | None, out: TextIO) -> int:
    model = spec.parse(body)
    there = None if stored is None else deployed.live(stored, model)
    settings, told = deployed.settings(model.namespace, there)
    rendered = deployed.rendered(body, settings, there, datetime.now(UTC))
    told += f" Kept as rendered before: revision {rendered.name}." if rendered.is_kept else ""
    sys.stderr.write(f"{told}\n")
    out.write(changes.yaml(rendered.children))
    return 0
