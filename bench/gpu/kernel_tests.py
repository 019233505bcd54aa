"""Part: the tests of the kernels, on the GPU that is there."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu.ledger import Ledger, Row
from bench.gpu.place import Place
from bench.gpu.sizes import TINY, Sizes

TITLE = "Tests on the device"
SECONDS = 280
COLUMNS = ("passed", "failed", "seconds", "first failures")
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "kernels" / "gpu"
_SETTINGS = Path(__file__).parent / "pytest.ini"
_SECONDS, _MARGIN, _WORKERS = 300, 20, 8  # a file; compiling takes most of it


def files(sizes: Sizes) -> list[Path]:
    """A row each: what one of them breaks, the others do not notice."""
    found = sorted(FOLDER.rglob("test_*.py"), key=lambda path: path.stem)
    return [path for path in found if sizes is not TINY or path.stem == "test_activations_triton"]


def goals(sizes: Sizes) -> dict[str, str]:
    """All of them."""
    return {path.stem: "none fails" for path in files(sizes)}


def run(place: Place, sizes: Sizes, ledger: Ledger) -> None:
    """A process for each file: a fault of the device ends the one that caused it."""
    for path in files(sizes):
        ledger.measure(path.stem, partial(_run, path, ledger, tiny=sizes is TINY))


def _run(path: Path, ledger: Ledger, *, tiny: bool) -> Row:
    """Ends by itself before the part is ended, which would leave pytest behind."""
    has_workers = not tiny and find_spec("xdist") is not None
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-p", "no:cacheprovider"]
        command += [f"-c={_SETTINGS}", f"--rootdir={ROOT}", f"--confcutdir={FOLDER}"]
        command += [f"-n{min(_WORKERS, os.cpu_count() or 1)}"] if has_workers else []
        done = subprocess.run(
            [*command, str(path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=min(_SECONDS, ledger.seconds_left + _MARGIN),
            check=False,
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-200:]!r}")
        suite = ElementTree.parse(report).getroot()[0]
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    names = [
        case.attrib["name"]
        for case in suite.iter("testcase")
        if any(part.tag in ("failure", "error") for part in case)
    ]
    if failed:
        print(done.stdout[-4000:], flush=True)
    return {
        "passed": int(suite.attrib["tests"]) - failed - int(suite.attrib["skipped"]),
        "failed": failed,
        "seconds": float(suite.attrib["time"]),
        "names": names[:5],
    }


def cells(row: Row, rows: dict[str, Row]) -> dict[str, str]:
    """As the table shows them."""
    return {
        "passed": str(row["passed"]),
        "failed": str(row["failed"]),
        "seconds": f"{row['seconds']:.0f}",
        "first failures": "; ".join(row["names"])[:200],
    }
