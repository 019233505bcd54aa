"""``kubectl quire status``: the status of one LLMDeployment or of all; with -w until interrupted.

``view`` formats the output.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TextIO

from quire_kubectl import kubectl, view
from quire_kubectl.kubectl import Document
from quire_kubectl.terminal import Canvas, Look


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Like kubectl's own, as far as they exist there."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="of an LLMDeployment (default: all)")
    parser.add_argument("-n", "--namespace", help="(default: that of kubectl's context)")
    parser.add_argument("-A", "--all-namespaces", action="store_true")
    parser.add_argument("-w", "--watch", action="store_true", help="show every change, until Ctrl-C")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")


def run(arguments: argparse.Namespace, out: TextIO = sys.stdout) -> int:
    """0: ready (of all: shown); 3: not ready, or a replica gets no node; 4: stalled. Raises KubectlError."""
    if arguments.name and arguments.all_namespaces:
        raise kubectl.KubectlError("give a NAME or -A, not both: a name is of one namespace")
    command = [kubectl.LLM_DEPLOYMENTS, *([arguments.name] if arguments.name else [])]
    command += ["--all-namespaces"] if arguments.all_namespaces else []
    command += ["--namespace", arguments.namespace] if arguments.namespace else []
    if arguments.watch:
        return _watch(arguments, command, out)
    document = json.loads(kubectl.run(["get", *command, "-o", "json"]))
    if arguments.output == "json":
        out.write(json.dumps(document, indent=2) + "\n")
    else:
        out.write(_text(document if arguments.name else document["items"], Look.of(out)) + "\n")
    return view.code(document) if arguments.name else 0


def _text(document: Document | list[Document], look: Look) -> str:
    return view.table(document, look) if isinstance(document, list) else view.details(document, look)


def _watch(arguments: argparse.Namespace, command: list[str], out: TextIO) -> int:
    """Ends with an error or Ctrl-C."""
    known: dict[str, Document] = {}
    canvas, last = Canvas(out), ""
    if out.isatty() and not arguments.name:
        canvas.show(view.NO_DEPLOYMENTS)
    with kubectl.watch(command) as events:
        for change, document in events:
            uid, is_gone = str(document["metadata"]["uid"]), change == "DELETED"
            if change == "ADDED" and known.get(uid) == document:
                continue  # a new watch has started
            known.pop(uid, None)
            if not is_gone:
                known[uid] = document
            if arguments.output == "json":
                out.write(json.dumps(document) + "\n")
                out.flush()
                continue
            if arguments.name and is_gone:
                text = f"{arguments.name} is deleted."
            else:
                text = _text(document if arguments.name else list(known.values()), Look.of(out))
            if text != last:
                canvas.show(text)
            last = text
    return 0
