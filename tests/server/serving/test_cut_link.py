"""The link between the nodes of a group is cut in the middle of answers, in network namespaces of the test's
own: both nodes end within the five seconds that a stopped rank or a dead link may take.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import tiny_model
from tests.server.serving.cut_link import STREAMS

LIMIT_SECONDS = 5.0
BUSY_SECONDS = 2.0  # of the other node, where no stream waits: room for a machine on which other tests run
AS_ROOT = () if os.geteuid() == 0 else ("--user", "--map-root-user")
RANKS = ("--tensor-parallel-size", "2")
STAGES = (*RANKS, "--pipeline-parallel-size", "2")


@pytest.mark.deep
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("side", "flags", "each"),
    [
        pytest.param("near", RANKS, 1, id="the leader's interface, ranks that share layers"),
        pytest.param("far", STAGES, 2, id="the worker's interface, stages"),
    ],
)
def test_a_cut_link_ends_every_stream_with_an_error_and_the_ranks_of_both_nodes_within_five_seconds(
    tmp_path, side, flags, each
):
    """Seconds are counted from just before the interface is set down until a stream's connection has ended,
    after its last event, and until none of a node's rank processes exists.
    """
    model = tiny_model.write(tmp_path / "tiny")
    scenario = [sys.executable, "-m", "tests.server.serving.cut_link", str(model), str(tmp_path), side]
    done = subprocess.run(
        ["unshare", *AS_ROOT, "--net", *scenario, *flags],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)

    cut = seen["cut"]
    assert (cut["reached_before"], cut["reached_after"]) == (True, False), "the link is cut"
    assert cut["state"] in ("DOWN", "LOWERLAYERDOWN")
    assert len(seen["errors"]) == STREAMS and all(error["code"] for error in seen["errors"]), seen
    assert all(seconds and seconds < LIMIT_SECONDS for seconds in seen["streams_ended"]), seen
    assert seen["ranks"] == [each, each]
    leader, worker = seen["gone"]
    assert leader and leader < LIMIT_SECONDS, seen
    assert worker and worker < LIMIT_SECONDS + BUSY_SECONDS, seen
    assert 0 not in seen["codes"], "both containers are restarted"
    assert "rank" in seen["reason"]["message"].lower(), "the lost rank is named"
    assert seen["shared"] > 0
    assert (seen["left_behind"], seen["listening"]) == ([], []), "processes, shared memory, ports"
