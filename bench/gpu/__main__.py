"""The command of `make bench-gpu`. Each part is a process with a limit of its own: a kernel that brings one
down, or never ends, takes its row with it and nothing else. Run again, it goes on with what is missing.

    python -m bench.gpu                       # all parts, at most 25 minutes
    python -m bench.gpu --only kernels,tuning
    python -m bench.gpu --again               # forget what was measured
    python -m bench.gpu --tiny --out DIR      # that it works, on a CPU, too
    python -m bench.gpu --report              # only write the page
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.gpu import report
from bench.gpu.ledger import Ledger, OutOfTimeError
from bench.gpu.place import here
from bench.gpu.sizes import FULL, TINY

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
_GRACE_SECONDS = 30  # of a part's, for the row that is under way when the rest is up
_CRASHES = 5  # of one part in one run, after each of which it goes on behind the row that did it
_OUT_OF_TIME = 3  # exit status


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 where every part has all its rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--only", default=",".join(report.PARTS), help="parts, with commas between them")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where gpu.md and gpu/ are written")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on a CPU, too")
    parser.add_argument("--again", action="store_true", help="measure what was measured already")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--part", choices=report.PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    folder = given.out.resolve() / "gpu"
    if given.part:
        return _run(given.part, folder, given.until, tiny=given.tiny)
    names = given.only.split(",")
    if unknown := set(names) - set(report.PARTS):
        parser.error(
            f"--only: there is no part {', '.join(sorted(unknown))}; there are {', '.join(report.PARTS)}"
        )
    complete = True
    if not given.report:
        if not given.tiny and not torch.cuda.is_available():
            parser.error("there is no GPU here: --tiny shows that the bench works")
        if given.again:
            for name in names:
                (folder / f"{name}.json").unlink(missing_ok=True)
        complete = _run_all(names, folder, tiny=given.tiny)
    page = given.out / "gpu.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(report.page(folder, TINY if given.tiny else FULL), encoding="utf-8")
    print(f"written: {page}", flush=True)
    return 0 if complete else 1


def _run_all(names: Sequence[str], folder: Path, *, tiny: bool) -> bool:
    """Whether all of them came to their end."""
    complete = True
    for name in names:
        began = time.time()
        seconds = float("inf") if tiny else report.PARTS[name].SECONDS
        complete &= in_process(name, folder, began + seconds, tiny=tiny)
        print(f"[{time.time() - began:.0f} s of {seconds}]", flush=True)
    return complete


def in_process(name: str, folder: Path, deadline: float, *, tiny: bool) -> bool:
    """One part, in processes of its own; whether it came to its end."""
    until = deadline - _GRACE_SECONDS
    command = [sys.executable, "-m", "bench.gpu", "--part", name, "--out", str(folder.parent)]
    command += [f"--until={until}", *(["--tiny"] if tiny else [])]
    for _ in range(_CRASHES):
        left = None if deadline == float("inf") else deadline - time.time()
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=left).returncode
        except subprocess.TimeoutExpired:
            print(f"{name}: ended, for its time was up", flush=True)
            return False
        if status in (0, _OUT_OF_TIME):
            return status == 0
        print(f"{name}: ended with {status}; on with the next row", flush=True)
        if time.time() > until:
            break
    return False


def _run(name: str, folder: Path, until: float, *, tiny: bool) -> int:
    """One part, in this process."""
    print(f"{name}: {report.PARTS[name].TITLE}", flush=True)
    with here() as place:
        ledger = Ledger(folder / f"{name}.json", place.machine(), until, place.synchronize)
        try:
            report.PARTS[name].run(place, TINY if tiny else FULL, ledger)
        except OutOfTimeError as error:
            print(f"{name}: the time is up before {error}", flush=True)
            return _OUT_OF_TIME
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
