"""``kubectl quire route`` and ``kubectl quire client``: the gateway's objects, one or all of them.

``gateway_view`` formats the output.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TextIO

from quire_kubectl import gateway_view, kubectl
from quire_kubectl.terminal import Look

_KINDS = {"route": "LLMRoute", "client": "LLMClient"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The same for both kinds."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="(default: all of the namespace)")
    parser.add_argument("-n", "--namespace", help="(default: that of kubectl's context)")
    parser.add_argument("-A", "--all-namespaces", action="store_true")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")


def run(arguments: argparse.Namespace, out: TextIO = sys.stdout) -> int:
    """0: ready at all gateways (of all: shown); 3: not. Raises KubectlError."""
    if arguments.name and arguments.all_namespaces:
        raise kubectl.KubectlError("give a NAME or -A, not both: a name is of one namespace")
    kind = _KINDS[arguments.command]
    where = ["--all-namespaces"] if arguments.all_namespaces else []
    where += ["--namespace", arguments.namespace] if arguments.namespace else []
    command = ["get", f"{kind.lower()}s.serving.quire.dev", *([arguments.name] if arguments.name else [])]
    document = json.loads(kubectl.run([*command, *where, "-o", "json"]))
    look = Look.of(out)
    if arguments.output == "json":
        text = json.dumps(document, indent=2)
    elif not arguments.name:
        text = gateway_view.table(kind, document["items"], look)
    elif kind == "LLMClient":
        text = gateway_view.client_details(document, look)
    else:
        found = kubectl.documents(["get", kubectl.LLM_DEPLOYMENTS, *where])
        by_name = {str(one["metadata"]["name"]): one for one in found}
        text = gateway_view.route_details(document, by_name, look)
    out.write(text + "\n")
    return gateway_view.code(document) if arguments.name else 0
