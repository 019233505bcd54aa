"""The API process by itself."""

import json
import subprocess
import sys


def test_an_unexpected_failure_is_written_to_the_failure_file(tiny, tmp_path):
    """The failure: the shared memory does not exist."""
    ended = subprocess.run([sys.executable, "-m", "quire_server.api", tmp_path, tiny], timeout=60)
    assert ended.returncode == 70
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["reason"] == "EngineCrashed"
    assert "FileNotFoundError" in failure["message"]
