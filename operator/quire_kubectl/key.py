"""``kubectl quire key``: a new key of an LLMClient, and the command that adds its digest.

The key is random, printed once and stored nowhere: the cluster gets the digest alone, from the user.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import shlex
import sys
from typing import TextIO


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose key."""
    parser.add_argument("name", metavar="NAME", help="of the LLMClient that it is for")
    parser.add_argument("-n", "--namespace", help="(default: that of kubectl's context)")


def run(arguments: argparse.Namespace, out: TextIO = sys.stdout) -> int:
    """Print it. Asks nothing of the cluster."""
    key = f"sk-{secrets.token_hex(32)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    where = ["--namespace", arguments.namespace] if arguments.namespace else []
    patch = json.dumps([{"op": "add", "path": "/spec/keyHashes/-", "value": digest}])
    command = ["kubectl", "patch", "llmclient", arguments.name, *where, "--type=json", "-p", patch]
    out.write(
        f"# The key, shown this once: give it to the client.\n{key}\n\n"
        f"# Its digest, which is no secret. A file in Git gets it as one more line of "
        f"spec.keyHashes:\n- {digest}\n\n"
        f"# A client of the cluster gets it by:\n{shlex.join(command)}\n"
    )
    return 0
