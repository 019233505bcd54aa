"""The command line: parses, prints, and turns errors into sentences and exit codes."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from quire_kubectl import batch, gateway, key, logs, plan, render, size, status
from quire_kubectl.kubectl import KubectlError
from quire_operator.errors import QuireOperatorError
from quire_sizing.errors import SizingError

_COMMANDS = {
    "status": (status, "how one LLMDeployment is, or all of them"),
    "logs": (logs, "what its pods say, and first why one ended badly"),
    "plan": (plan, "what an edit would do: fields, children, pods, step by step"),
    "render": (render, "the children that the operator makes of it, as YAML"),
    "route": (gateway, "where the requests of one LLMRoute go now, or all of them"),
    "client": (gateway, "what one LLMClient may use and has used, or all of them"),
    "key": (key, "a new key of an LLMClient, and how its digest is added"),
    "size": (size, "does a model fit on an accelerator?"),
    "batch": (batch, "the batches of a client of the gateway, and how far they are"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0: done; 1: an error, named on stderr; 2: wrong usage; 3, 4: a result of the command."""
    parser = argparse.ArgumentParser(
        prog="kubectl quire",
        description="LLMDeployments, and what the gateway serves of them, at a terminal.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, about) in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=about))
    parsed = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a child kubectl is ended, too
    try:
        module, _ = _COMMANDS[parsed.command]
        return int(module.run(parsed))
    except (KubectlError, QuireOperatorError, SizingError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\n" if sys.stderr.isatty() else "")
        return 130
    except BrokenPipeError:  # as with `| head`
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
