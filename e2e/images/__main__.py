"""`python -m e2e.images build|push|lock-base`: the images from a shell or a Makefile."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.images import base, build
from e2e.images.errors import ImageError
from e2e.images.target import Target

_COMMANDS = {
    "build": "build what the working tree changed",
    "lock-base": "record the digest of the public base image",
    "push": "push it to the cluster's registry (or QUIRE_REGISTRY) and print the references",
}


def main(argv: Sequence[str]) -> int:
    """Runs one command; an error of ours is one message, not a traceback."""
    parser = argparse.ArgumentParser(prog="python -m e2e.images", description="Quire's images.")
    parser.add_argument(
        "command", choices=_COMMANDS, help="; ".join(f"{n}: {w}" for n, w in _COMMANDS.items())
    )
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout (default: here)")
    arguments = parser.parse_args(argv)
    root = arguments.root.resolve()
    try:
        if arguments.command == "lock-base":
            print(base.lock(root))
        elif arguments.command == "build":
            build.build(root, os.environ)
        else:
            target = Target.of(root, os.environ)
            build.push(root, target.registry, os.environ, target.within)
    except (ImageError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
