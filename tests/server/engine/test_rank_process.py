"""The process of a rank, beside a rank 0 that does not do its part."""

import os
import subprocess
import sys

from quire_server.engine import rank_channel
from quire_server.engine.rank_channel import Channel, Hello
from quire_server.health.heartbeat import SharedState


def test_a_rank_ends_when_rank_0_has_ended_and_leaves_no_reason_of_its_own(tmp_path):
    SharedState.create(tmp_path)
    arguments = [str(tmp_path), str(tmp_path / "model"), "--tensor-parallel-size", "2"]
    with rank_channel.listen(tmp_path, 1) as listener:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire_server.engine.rank", "1", *arguments], env=os.environ
        )
        try:
            listener.settimeout(60)
            channel = Channel(listener.accept()[0])
            assert isinstance(channel.hear(60), Hello)
            channel.close()
            assert process.wait(30) == 1
        finally:
            process.kill()
            process.wait()
    assert not (tmp_path / "failure.json").exists()
