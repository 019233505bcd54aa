"""With CI=true a test that cannot run is a failure, elsewhere a skip; an expected failure is neither."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest
def test_runs(): pass
@pytest.mark.skip(reason="marked")
def test_marked(): pass
@pytest.fixture
def cluster(): pytest.skip("no cluster")
def test_needs_cluster(cluster): pass
@pytest.mark.xfail(strict=True)
def test_known_bug(): assert False
"""


@pytest.mark.parametrize(
    ("environment", "outcome"),
    [({"CI": "true"}, "1 passed, 1 xfailed, 2 errors"), ({}, "1 passed, 2 skipped, 1 xfailed")],
    ids=["in CI", "elsewhere"],
)
def test_a_skip_is_a_failure_in_ci(tmp_path: Path, environment: dict[str, str], outcome: str) -> None:
    assert run(tmp_path, TESTS, environment).startswith(outcome)


def test_a_module_that_cannot_be_imported_is_a_failure_in_ci(tmp_path: Path) -> None:
    module = "import pytest; pytest.importorskip('not_a_module')"
    assert "1 error" in run(tmp_path, module, {"CI": "true"})


def run(directory: Path, tests: str, environment: dict[str, str]) -> str:
    """The closing line of a run of its own, under the repository's conftest."""
    shutil.copy(ROOT / "conftest.py", directory)
    (directory / "test_it.py").write_text(tests)
    (directory / "pytest.ini").write_text("[pytest]\n")
    environment = environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to load
    inherited = {name: value for name, value in os.environ.items() if name != "CI"}
    # The conftest imports from the repository.
    paths = filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))
    inherited["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(directory),
            str(directory),
        ],
        env=inherited | environment,
        cwd=directory,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip().splitlines()[-1].strip("= ")
