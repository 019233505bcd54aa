"""The API process by itself."""

import json
import subprocess
import sys


def test_a_failure_that_nobody_foresaw_leaves_its_reason_to_the_supervisor(tiny, tmp_path):
    """Here: the shared memory is not there."""
    ended = subprocess.run([sys.executable, "-m", "quire_server.api", tmp_path, tiny], timeout=60)
    assert ended.returncode == 70
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["reason"] == "EngineCrashed"
    assert "FileNotFoundError" in failure["message"]
