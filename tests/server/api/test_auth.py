"""API keys that are read from a directory."""

import hmac
import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_http.errors import ApiError
from quire_server.api import auth
from quire_server.api.auth import Keys, Principal
from quire_server.core.policy import CLASSES, MIN_PRIORITY


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_without_a_directory_no_key_is_required(clock):
    assert not Keys(None, clock).required


def test_a_key_names_its_client(tmp_path, clock):
    (tmp_path / "alice").write_text("alice-key\n")
    (tmp_path / "bob").write_text("bob-key")
    keys = Keys(tmp_path, clock)
    assert keys.required
    assert keys.principal_of(b"alice-key").client == "alice"
    assert keys.principal_of(b"bob-key").client == "bob"


@pytest.mark.parametrize("key", [b"", b"alice-ke", b"\xff\x00"])
def test_other_keys_are_refused(key, tmp_path, clock):
    (tmp_path / "alice").write_text("alice-key")
    (tmp_path / "empty").write_text(" \n")
    assert Keys(tmp_path, clock).principal_of(key) is None


@pytest.mark.parametrize("directory", ["", "missing"])
def test_an_empty_or_missing_directory_refuses_every_key(directory, tmp_path, clock):
    assert Keys(tmp_path / directory, clock).principal_of(b"x") is None


def test_keys_are_read_through_the_symlinks_of_a_mounted_secret_and_only_once(tmp_path, clock):
    version = tmp_path / "..2026_01_01"
    version.mkdir()
    (version / "alice").write_text("first")
    os.symlink(version.name, tmp_path / "..data")
    os.symlink("..data/alice", tmp_path / "alice")
    keys = Keys(tmp_path, clock)
    assert keys.principal_of(b"first").client == "alice"

    newer = tmp_path / "..2026_01_02"
    newer.mkdir()
    (newer / "alice").write_text("second")
    os.symlink(newer.name, tmp_path / "..data_tmp")
    os.rename(tmp_path / "..data_tmp", tmp_path / "..data")
    clock.now += 3
    assert keys.principal_of(b"first") is None
    assert keys.principal_of(b"second").client == "alice"


def test_a_removed_key_is_refused_within_seconds(tmp_path, clock):
    (tmp_path / "alice").write_text("k")
    keys = Keys(tmp_path, clock)
    assert keys.principal_of(b"k").client == "alice"
    (tmp_path / "alice").unlink()
    clock.now += 3
    assert keys.principal_of(b"k") is None


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
        keys.principal_of(key.encode())
        assert compared == [32] * 3, "each key, by digests of one length, whatever was found before"


def principal(tmp_path, clock, content, client="alice"):
    (tmp_path / client).write_text(content)
    return Keys(tmp_path, clock).principal_of(b"k")


def test_a_key_without_settings_shares_no_prefixes_is_never_urgent_and_no_admin(tmp_path, clock):
    alice = principal(tmp_path, clock, "k\n")
    assert (alice.highest_priority, alice.is_admin) == (CLASSES["normal"], False)
    assert alice.cache_salt("") != principal(tmp_path, clock, "k\n", "a-client-before").cache_salt("")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_further_lines_of_an_entry_say_what_its_key_may_do(end, tmp_path, clock):
    lines = ("k", "group: team-a", "highest-priority:high", " admin : true ")
    alice = principal(tmp_path, clock, end.join(lines) + end)
    assert (alice.client, alice.highest_priority, alice.is_admin) == ("alice", CLASSES["high"], True)
    assert alice.cache_salt("x") == Principal("bob", alice.cache_scope).cache_salt("x")
    assert principal(tmp_path, clock, "k\nhighest-priority: -100").highest_priority == MIN_PRIORITY


@pytest.mark.parametrize(
    "line",
    [
        "sesame",
        "grup: a",
        "group:",
        "group: a b",
        "group: a/b",
        "admin: yes",
        "admin",
        "highest-priority: urgent",
        "highest-priority: 101",
        "highest-priority: 1.5",
        "group: a\ngroup: b",
        "x" * 4096,
        "\udcff: sesame",
    ],
)
def test_an_entry_that_is_not_understood_is_no_key_and_the_log_names_it_once(line, tmp_path, clock, caplog):
    (tmp_path / "bob").write_text("b")
    (tmp_path / "alice").write_bytes(f"k\n{line}".encode(errors="surrogateescape"))
    keys = Keys(tmp_path, clock)
    for _ in range(3):
        assert keys.principal_of(b"k") is None
        assert keys.principal_of(b"b").client == "bob"
        clock.now += 3
    [record] = caplog.records
    assert record.client == "alice"
    assert ("line " in record.why or "4096" in record.why) and "sesame" not in record.why


def test_a_key_that_two_clients_have_is_the_first_one_s(tmp_path, clock, caplog):
    (tmp_path / "bob").write_text("k\nadmin: true")
    (tmp_path / "alice").write_text("k")
    found = Keys(tmp_path, clock).principal_of(b"k")
    assert (found.client, found.is_admin) == ("alice", False)
    assert [record.client for record in caplog.records] == ["bob"]


names = st.text("-._abz019", min_size=1, max_size=4)
scopes = st.one_of(st.just(""), st.builds("key/{}".format, names), st.builds("group/{}".format, names))
whose = st.tuples(scopes, st.text("\0/agk-1", max_size=6))


@given(whose, whose)
def test_salts_are_equal_only_within_one_scope_and_never_a_health_check_s(one, other):
    salts = [Principal(cache_scope=scope).cache_salt(asked) for scope, asked in (one, other)]
    assert (salts[0] == salts[1]) == (one == other)
    assert salts[0] != "" and not salts[0].startswith("canary-")


@pytest.mark.parametrize(
    ("highest", "asked", "priority"),
    [
        (-100, -100, -100),
        (-100, 0, 0),
        (-10, -10, -10),
        (-10, -11, None),
        (0, -1, None),
        (0, 0, 0),
        (0, 7, 7),
        (10, 0, 10),  # what a request without a priority asks for
        (10, 20, 20),
        (10, -1, None),
    ],
)
def test_no_request_is_more_urgent_than_its_key_may_be(highest, asked, priority):
    key = Principal(highest_priority=highest)
    if priority is not None:
        assert key.priority(asked) == priority
        return
    with pytest.raises(ApiError, match="highest-priority") as refused:
        key.priority(asked)
    assert refused.value.status == 403
