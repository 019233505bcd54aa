"""`python -m e2e.cluster COMMAND`: the cluster from a shell or a Makefile."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from e2e.cluster import lifecycle, plan, postgresql, programs, prometheus, valkey
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import MAX_NODES, Checkout, foreign_kubeconfig

_COMMANDS = {
    "build": "build the programs into .cluster/bin",
    "plan": "say what `up` will change on this machine",
    "setup": "install missing packages and build the programs",
    "up": "bring the cluster up, or repair it",
    "start": "the same without the plan, for `make up`, which has shown it; helm is built as well",
    "down": "take it away",
    "status": "say what runs",
}


def main(argv: Sequence[str]) -> int:
    """Runs one command; an error of ours is one message, not a traceback."""
    epilog = "\n".join(f"  {name:<8} {what}" for name, what in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m e2e.cluster",
        description="A real Kubernetes of one or two nodes for this checkout.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=_COMMANDS)
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="PROGRAM", help="what to build (default: all)"
    )
    parser.add_argument(
        "--nodes",
        type=int,
        choices=range(1, MAX_NODES + 1),
        help="how many (default: as many as there are, or 1)",
    )
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout (default: here)")
    arguments = parser.parse_args(argv)
    try:
        _run(arguments.command, arguments.root, tuple(arguments.only), arguments.nodes)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(command: str, root: Path, only: tuple[str, ...], nodes: int | None) -> None:
    checkout = Checkout.at(root)
    if command == "build":
        programs.build(checkout.bin, only)
        return
    if command == "setup":
        lifecycle.setup(checkout)
        prometheus.unpack(checkout.state)  # for tests: `up` does without
        postgresql.unpack(checkout.state)
        valkey.unpack(checkout.state)
        return
    foreign = foreign_kubeconfig(checkout, os.environ)
    if foreign is not None:
        print(f"KUBECONFIG={foreign} is used as it is: nothing is started or stopped here")
    elif command == "plan":
        print(plan.describe(checkout, plan.observe(checkout, nodes)))
    elif command == "start":
        programs.build(checkout.bin, programs.OF_UP)
        lifecycle.up(root, nodes)
    elif command == "up":
        print(plan.describe(checkout, plan.observe(checkout, nodes)), flush=True)
        cluster = lifecycle.up(root, nodes)
        print(f"export KUBECONFIG={cluster.kubeconfig}")
    elif command == "down":
        lifecycle.down(root)
    else:
        print(lifecycle.status(root))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
