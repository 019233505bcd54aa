"""The process of a rank, beside a rank 0 that does not do its part."""

import os
import subprocess
import sys

from quire_server.engine import rank_channel
from quire_server.engine.rank_channel import Channel, Hello
from quire_server.health.heartbeat import SharedState
from tests.server import tiny_model


def test_a_rank_ends_when_rank_0_has_ended_and_leaves_no_reason_of_its_own(tmp_path):
    model, run_dir = tiny_model.write(tmp_path / "model"), tmp_path / "run"
    run_dir.mkdir()
    SharedState.create(run_dir)
    command = [sys.executable, "-m", "quire_server.engine.rank", "1", str(run_dir), str(model)]
    with rank_channel.listen(run_dir, 1) as listener:
        process = subprocess.Popen([*command, "--tensor-parallel-size", "2"], env=os.environ)
        try:
            listener.settimeout(60)
            channel = Channel(listener.accept()[0])
            assert isinstance(channel.hear(60), Hello)
            channel.close()
            assert process.wait(30) == 1
        finally:
            process.kill()
            process.wait()
    assert not (run_dir / "failure.json").exists()
