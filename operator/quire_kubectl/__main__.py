"""The command line: parses, prints, and turns errors into sentences and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from quire_kubectl import size
from quire_sizing.errors import SizingError


def main(arguments: Sequence[str] | None = None) -> int:
    """0: done; 1: an error, named on stderr; 2: wrong usage; 3: the model does not fit."""
    parser = argparse.ArgumentParser(prog="kubectl quire", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    size.add_arguments(commands.add_parser("size", help="does a model fit on an accelerator?"))
    parsed = parser.parse_args(arguments)
    try:
        text, code = size.run(parsed)
    except SizingError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
