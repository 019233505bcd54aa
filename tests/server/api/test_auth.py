"""API keys that are read from a directory."""

import hmac
import os
from types import SimpleNamespace

import pytest

from quire_server.api import auth
from quire_server.api.auth import Keys


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def bearer(key):
    return b"Bearer " + key.encode()


def test_without_a_directory_no_key_is_required(clock):
    assert not Keys(None, clock).required


def test_a_key_names_its_client(tmp_path, clock):
    (tmp_path / "alice").write_text("alice-key\n")
    (tmp_path / "bob").write_text("bob-key")
    keys = Keys(tmp_path, clock)
    assert keys.required
    assert keys.client_of(bearer("alice-key")) == "alice"
    assert keys.client_of(b"bearer  bob-key ") == "bob"


@pytest.mark.parametrize(
    "header",
    [b"", b"Bearer", b"Bearer ", b"Basic alice-key", b"alice-key", b"Bearer alice-ke", b"Bearer \xff\x00"],
)
def test_other_authorization_headers_are_refused(header, tmp_path, clock):
    (tmp_path / "alice").write_text("alice-key")
    (tmp_path / "empty").write_text(" \n")
    assert Keys(tmp_path, clock).client_of(header) is None


@pytest.mark.parametrize("directory", ["", "missing"])
def test_an_empty_or_missing_directory_refuses_every_key(directory, tmp_path, clock):
    assert Keys(tmp_path / directory, clock).client_of(bearer("x")) is None


def test_keys_are_read_through_the_symlinks_of_a_mounted_secret_and_only_once(tmp_path, clock):
    version = tmp_path / "..2026_01_01"
    version.mkdir()
    (version / "alice").write_text("first")
    os.symlink(version.name, tmp_path / "..data")
    os.symlink("..data/alice", tmp_path / "alice")
    keys = Keys(tmp_path, clock)
    assert keys.client_of(bearer("first")) == "alice"

    newer = tmp_path / "..2026_01_02"
    newer.mkdir()
    (newer / "alice").write_text("second")
    os.symlink(newer.name, tmp_path / "..data_tmp")
    os.rename(tmp_path / "..data_tmp", tmp_path / "..data")
    clock.now += 3
    assert keys.client_of(bearer("first")) is None
    assert keys.client_of(bearer("second")) == "alice"


def test_a_removed_key_is_refused_within_seconds(tmp_path, clock):
    (tmp_path / "alice").write_text("k")
    keys = Keys(tmp_path, clock)
    assert keys.client_of(bearer("k")) == "alice"
    (tmp_path / "alice").unlink()
    clock.now += 3
    assert keys.client_of(bearer("k")) is None


def test_keys_are_compared_in_constant_time(tmp_path, clock, monkeypatch):
    for client in ("alice", "bob", "carol"):
        (tmp_path / client).write_text(f"{client}-key")
    compared = []

    def compare(digest, presented):
        compared.append(len(presented))
        return hmac.compare_digest(digest, presented)

    monkeypatch.setattr(auth, "hmac", SimpleNamespace(compare_digest=compare))
    keys = Keys(tmp_path, clock)
    for key in ("alice-key", "carol-key", "x", "alice-ke", "alice-key" * 99):
        compared.clear()
        keys.client_of(bearer(key))
        assert compared == [32] * 3, "each key, by digests of one length, whatever was found before"
