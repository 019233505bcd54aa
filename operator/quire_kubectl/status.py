"""``kubectl quire status``: how one LLMDeployment is, or all of them; with -w until somebody ends it.

Called by ``__main__``. What is shown is ``view``'s.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TextIO

from quire_kubectl import kubectl, view
from quire_kubectl.kubectl import Document

_HOME_AND_CLEAR = "\x1b[H\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As kubectl's own, so far as there are the same."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="of an LLMDeployment (default: all)")
    parser.add_argument("-n", "--namespace", help="(default: that of kubectl's context)")
    parser.add_argument("-A", "--all-namespaces", action="store_true")
    parser.add_argument("-w", "--watch", action="store_true", help="show every change, until Ctrl-C")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")


def run(arguments: argparse.Namespace, out: TextIO = sys.stdout) -> int:
    """0: ready (of all: shown); 3: not ready; 4: stalled. Raises KubectlError."""
    if arguments.name and arguments.all_namespaces:
        raise kubectl.KubectlError("give a NAME or -A, not both: a name is of one namespace")
    scope = ["--all-namespaces"] if arguments.all_namespaces else []
    scope += ["--namespace", arguments.namespace] if arguments.namespace else []
    if arguments.watch:
        return _watch(arguments, scope, out)
    document = kubectl.get(arguments.name, scope)
    out.write(_shown(arguments, document if arguments.name else document["items"]) + "\n")
    return view.code(document) if arguments.name else 0


def _shown(arguments: argparse.Namespace, document: Document | list[Document]) -> str:
    if arguments.output == "json":
        return json.dumps(document, indent=None if arguments.watch else 2)
    return view.table(document) if isinstance(document, list) else view.details(document)


def _watch(arguments: argparse.Namespace, scope: list[str], out: TextIO) -> int:
    """A terminal is drawn anew; elsewhere each change is another line or paragraph."""
    known: dict[str, Document] = {}
    last, ended = "", 3
    with kubectl.watch(arguments.name, scope) as documents:
        for document in documents:
            known[str(document["metadata"]["uid"])] = document
            whole = arguments.name or arguments.output == "json"
            text = _shown(arguments, document if whole else list(known.values()))
            ended = view.code(document) if arguments.name else 0
            if text == last:
                continue
            redraws = out.isatty() and arguments.output == "text"
            out.write((_HOME_AND_CLEAR if redraws else "") + text + "\n")
            out.flush()
            last = text
    return ended
