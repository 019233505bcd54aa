"""A fetch that is killed at any moment, or whose disk is full: partial files are resumed, or the error is
reported.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from tests.server.fetch import published
from tests.server.fetch.hub_server import HubServer

KILLS = 20
PIECE = 16 << 10


class Gate:
    """Lets a number of chunks pass, and signals when the last of them has."""

    def __init__(self) -> None:
        self._left = 0
        self._is_open = False
        self._changed = threading.Condition()

    def __call__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left > 0 or self._is_open)
            self._left -= 1
            self._changed.notify_all()

    def let(self, count: int) -> None:
        with self._changed:
            self._left = count
            self._changed.notify_all()

    def wait_until_passed(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._left <= 0, timeout=60)

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


@pytest.fixture
def hub():
    server = HubServer(published.files(shard_bytes=40 * PIECE))
    server.piece = PIECE
    yield server
    server.close()


def command(place):
    return [sys.executable, "-m", "quire_server", "fetch", "hf://org/tiny", "--to", str(place)]


@pytest.mark.deep
def test_twenty_kills_at_random_end_with_the_right_bytes(hub, tmp_path):
    place = tmp_path / "model"
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint}
    gate, rng = Gate(), random.Random(7)
    hub.before_piece = gate
    for _ in range(KILLS):
        gate.let(rng.randint(1, 5))
        with subprocess.Popen(command(place), env=environment, stdout=subprocess.DEVNULL) as process:
            assert gate.wait_until_passed()
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert not place.exists()
    gate.open()
    before = sum(hub.sent.values())
    done = subprocess.run(command(place), env=environment, capture_output=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["reason"] == "Fetched"
    assert {name: (place / name).read_bytes() for name in published.WANTED} == {
        name: hub.files[name] for name in published.WANTED
    }
    assert sum(hub.sent.values()) - before < sum(len(hub.files[name]) for name in published.WANTED)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_without_waiting_for_the_download(number, hub, tmp_path):
    gate = Gate()
    hub.before_piece = gate
    gate.let(2)
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint}
    with subprocess.Popen(command(tmp_path / "model"), env=environment, stdout=subprocess.DEVNULL) as process:
        assert gate.wait_until_passed()
        process.send_signal(number)
        try:
            process.wait(30)
        finally:
            gate.open()
    assert process.returncode == 128 + number  # needs a handler: pid 1 has no default action


def test_partial_files_of_another_revision_are_removed(hub, fetch, tmp_path):
    place = tmp_path / "model"
    left = tmp_path / ".model.0123456789abcdef.part"
    left.mkdir()
    (left / published.SHARDS[0]).write_bytes(b"of last week")
    assert fetch("hf://org/tiny", to=place, HF_ENDPOINT=hub.endpoint).code == 0
    assert not left.exists()
    assert (place / published.SHARDS[0]).read_bytes() == hub.files[published.SHARDS[0]]


def test_a_repair_killed_at_its_end_does_not_block_a_later_one(hub, fetch, tmp_path):
    place, old = tmp_path / "model", tmp_path / ".model.old"
    assert fetch("hf://org/tiny", to=place, HF_ENDPOINT=hub.endpoint).code == 0
    shutil.copytree(place, old)
    (place / published.SHARDS[0]).write_bytes(b"corrupt")

    outcome = fetch("hf://org/tiny", to=place, HF_ENDPOINT=hub.endpoint)

    assert (outcome.code, outcome.error) == (0, "")
    assert not old.exists()
    assert (place / published.SHARDS[0]).read_bytes() == hub.files[published.SHARDS[0]]


def test_a_full_disk_is_reported_and_partial_files_are_kept(hub, tmp_path):
    place = tmp_path / "model"
    limit = 20 * PIECE
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint}

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    full = subprocess.run(
        command(place), env=environment, capture_output=True, preexec_fn=small_files, check=False
    )
    assert full.returncode == 73
    assert b"There is no room for model-0000" in full.stderr
    before = sum(hub.sent.values())
    assert (
        subprocess.run(command(place), env=environment, stdout=subprocess.DEVNULL, check=False).returncode
        == 0
    )
    assert sum(hub.sent.values()) - before < sum(len(hub.files[name]) for name in published.WANTED)


def test_a_read_only_volume_is_a_configuration_error(hub, fetch, tmp_path):
    (tmp_path / "file").write_text("")
    outcome = fetch("hf://org/tiny", to=tmp_path / "file" / "model", HF_ENDPOINT=hub.endpoint)
    assert outcome.code == 73
    assert "Check the volume" in outcome.error
