"""``kubectl quire render``: the children that the operator would apply for an LLMDeployment, as YAML.

They are rendered by the operator's own code. A note on which settings were used goes to stderr.
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
    """The name of a stored LLMDeployment, or a file."""
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
    live = None if stored is None else deployed.live(stored, model)
    settings, note = deployed.settings(model.namespace, live)
    rendered = deployed.rendered(body, settings, live, datetime.now(UTC))
    note += f" Kept as rendered before: revision {rendered.name}." if rendered.is_stored else ""
    sys.stderr.write(f"{note}\n")
    out.write(changes.yaml(rendered.children))
    return 0
