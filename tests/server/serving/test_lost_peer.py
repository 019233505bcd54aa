"""A client whose machine vanishes in the middle of an answer, in network namespaces of the test's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import tiny_model

NOTICED_SECONDS = 30.0  # 20 s, and time for a busy machine
AS_ROOT = () if os.geteuid() == 0 else ("--user", "--map-root-user")


@pytest.mark.deep
def test_the_blocks_of_a_client_that_vanished_are_freed_within_a_bound_whether_its_connection_was_idle_or_not(
    tmp_path,
):
    model = tiny_model.write(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20_000}))
    scenario = [sys.executable, "-m", "tests.server.serving.lost_peer", str(model), str(tmp_path)]
    done = subprocess.run(
        ["unshare", *AS_ROOT, "--net", *scenario],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["used"] > 0
    assert seen["clients_know"] == [None, None], "nobody told them, so the server found out by itself"
    assert len(seen["aborted"]) == 2 and max(seen["aborted"]) < NOTICED_SECONDS, seen
    assert seen["freed"] < 5
