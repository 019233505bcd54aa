"""The link between the two nodes of a group is cut in the middle of answers (used by ``bench.distributed``):
how long until each stream has ended with an error, and until no rank of either node is left.

The nodes are network namespaces of the test's own, see ``tests.server.serving.cut_link``.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.compare import table
from tests.server import tiny_model

CUTS = 5
#: Title -> the end of the link that is set down, and how the ranks of both nodes divide the model.
CASES = {
    "the leader's, ranks that share layers": ("near", ["--tensor-parallel-size", "2"]),
    "the worker's, stages": ("far", ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]),
}
_ROOT = Path(__file__).parents[1]
_AS_ROOT = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]


def _cut(model: Path, directory: Path, side: str, flags: list[str]) -> dict[str, Any]:
    """What was seen of one cut."""
    scenario = [sys.executable, "-m", "tests.server.serving.cut_link", str(model), str(directory), side]
    argv = ["unshare", *_AS_ROOT, "--net", *scenario, *flags]
    seen: dict[str, Any] = json.loads(subprocess.check_output(argv, cwd=_ROOT))
    if seen["cut"]["reached_after"]:
        raise RuntimeError(f"the link was not cut: {seen}")
    return seen


def report() -> str:
    """Its table."""
    rows = []
    for name, (side, flags) in CASES.items():
        seen = []
        for _ in range(CUTS):
            with tempfile.TemporaryDirectory() as folder:
                model = tiny_model.write(Path(folder) / "tiny")
                seen.append(_cut(model, Path(folder), side, flags))
        streams = [seconds for one in seen for seconds in one["streams_ended"]]
        errors = sum(bool(error["code"]) for one in seen for error in one["errors"])
        leader, worker = zip(*(one["gone"] for one in seen), strict=True)
        rows.append(
            [name, str(CUTS), f"{errors} of {len(streams)}", *map(_seconds, (streams, leader, worker))]
        )
    head = ["interface set down", "cuts", "streams with an error event", "streams ended, s: median / slowest"]
    return table([*head, "leader's ranks gone", "worker's ranks gone"], rows)


def _seconds(found: Any) -> str:
    return f"{statistics.median(found):.2f} / {max(found):.2f}"
