"""`make test` leaves no test out, though it names folders: each of its workers would load all of `tests`.

But for those beside KEDA itself, which takes longer to build than all else to test: `make keda`.
"""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_needs_an_api_server_or_a_cluster_lies_where_make_test_looks_for_it() -> None:
    lines = [
        line for line in (ROOT / "Makefile").read_text().splitlines() if "-m" in line and "$(PYTEST)" in line
    ]
    run = [line for line in lines if re.search(r'-m "?(api|cluster)', line)]
    folders = [ROOT / word for line in run for word in line.split() if re.match(r"(tests|e2e)/", word)]
    marked = [
        path
        for folder in ("tests", "e2e")
        for path in (ROOT / folder).rglob("test_*.py")
        if (folder == "e2e" and not re.search(r"\bmark\.keda\b", path.read_text()))
        or re.search(r"\bmark\.(api|cluster)\b", path.read_text())
    ]
    assert len(folders) >= 5 and len(marked) >= 20
    assert [path for path in marked if not any(folder in path.parents for folder in folders)] == []


def test_what_make_runs_keeps_bytecode_whatever_the_machine_says() -> None:
    """A server's start takes 7 s instead of 3 without, and a test run starts fifty."""
    asked = subprocess.run(
        ["make", "-s", "--eval", 'probe: ; @echo "[$${PYTHONDONTWRITEBYTECODE-}]"', "probe"],
        cwd=ROOT,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout == "[]\n"
