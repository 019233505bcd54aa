"""The run directory: gone with its server, however that ended, and refused with a reason where there is no
room.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from quire_server.config import ServeConfig
from quire_server.errors import DiskError
from quire_server.supervisor import main
from quire_server.supervisor.run_dir import run_dir

KILLED = """
import os, signal, sys
from pathlib import Path
from quire_server.supervisor.run_dir import run_dir
with run_dir([Path(sys.argv[1])]) as (path, state):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_is_gone_when_its_server_has_ended(tmp_path):
    with run_dir([tmp_path]) as (path, _):
        assert path.parent == tmp_path
        (path / "socket").touch()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_supervisor_left_is_removed_by_the_next_and_what_is_used_is_not(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=os.environ, check=False)
    (left,) = tmp_path.iterdir()
    (tmp_path / "quire-of-another-user").mkdir()
    with run_dir([tmp_path]) as (path, _):
        assert not left.exists()
        with run_dir([tmp_path]) as (second, _):
            assert path.exists()
            assert second != path
    assert [each.name for each in tmp_path.iterdir()] == ["quire-of-another-user"]


def test_without_room_in_memory_it_is_on_the_disk(tmp_path):
    with run_dir([tmp_path / "missing", tmp_path]) as (path, _):
        assert path.parent == tmp_path


def test_a_directory_that_cannot_be_filled_is_removed_again(tmp_path, monkeypatch):
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(
        "quire_server.health.heartbeat.SharedState.create", lambda _: (_ for _ in ()).throw(full)
    )
    with pytest.raises(DiskError, match="No space left on device"), run_dir([tmp_path]):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_has_room_for_the_directory_but_not_for_all_that_comes_there_is_not_chosen(
    tmp_path, monkeypatch
):
    """Ranks that found no room for their addresses ended, and there was none to say why."""
    few, usage = tmp_path / "few", shutil.disk_usage
    few.mkdir()
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage(path)._replace(free=1 << 14) if path == few else usage(path)
    )
    with run_dir([few, tmp_path]) as (path, _):
        assert path.parent == tmp_path
    assert list(few.iterdir()) == []
    with pytest.raises(DiskError, match="No space left on device"), run_dir([few]):
        pass


def test_a_server_without_room_ends_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(main.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    log = tmp_path / "termination-log"
    log.touch()
    assert main.serve(ServeConfig(model=tmp_path, termination_log=log), [], {}) == 73
    assert json.loads(log.read_text())["reason"] == "OutOfDisk"
