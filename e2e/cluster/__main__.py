"""`python -m e2e.cluster ...`: the cluster from a shell or a Makefile."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from e2e.cluster import programs
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Checkout


def main(argv: Sequence[str]) -> int:
    """Runs one command; an error of ours is one message, not a traceback."""
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    parser.add_argument("command", choices=["build"])
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout (default: here)")
    arguments = parser.parse_args(argv)
    try:
        checkout = Checkout.at(arguments.root)
        programs.build(checkout.bin)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
