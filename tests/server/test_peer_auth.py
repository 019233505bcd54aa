"""The key by which pods of a model know each other, and the connections that have not shown it yet."""

import socket
import struct

import pytest

from quire_server import peer_auth
from quire_server.engine import rank_auth
from quire_server.kv_transfer import handshake
from quire_server.peer_auth import PeerKeyError, UnprovedConnections


def test_the_key_is_of_all_entries_of_the_secret_and_of_their_names(tmp_path):
    assert peer_auth.read_key(None) == b""
    (tmp_path / "alice").write_text("1")
    one = peer_auth.read_key(tmp_path)
    (tmp_path / "..data").mkdir()
    (tmp_path / "lost+found").mkdir()
    assert peer_auth.read_key(tmp_path) == one
    (tmp_path / "bob").write_text("2")
    two = peer_auth.read_key(tmp_path)
    (tmp_path / "bob").rename(tmp_path / "carol")
    assert len({one, two, peer_auth.read_key(tmp_path)}) == 3


def test_ranks_and_transfers_have_the_same_key(tmp_path):
    (tmp_path / "key").write_text("ours")
    assert rank_auth.key_of(tmp_path) == handshake.read_key(tmp_path) == peer_auth.read_key(tmp_path)


@pytest.mark.parametrize("names", [[], ["password"]], ids=["no entry", "an empty entry"])
def test_a_secret_without_content_is_no_key_that_everyone_could_compute(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("\n")
    with pytest.raises(PeerKeyError, match="all entries of the Secret in .* are empty"):
        peer_auth.read_key(tmp_path)


def test_a_secret_that_is_being_replaced_is_no_key_for_a_moment(tmp_path):
    with pytest.raises(PeerKeyError, match="No such file"):
        peer_auth.read_key(tmp_path / "gone")


def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), 5)
        return near, listener.accept()[0]


def test_the_oldest_connection_without_a_proof_makes_room_for_a_new_one():
    unproved, pairs = UnprovedConnections(2), [pair() for _ in range(4)]
    try:
        unproved.add(pairs[0][1])
        unproved.add(pairs[1][1])
        unproved.remove(pairs[0][1])  # it has proved what it had to
        unproved.add(pairs[2][1])
        unproved.add(pairs[3][1])
        assert pairs[1][0].recv(1) == b"", "the oldest without a proof is shut down"
        for near, far in (pairs[0], pairs[2], pairs[3]):
            far.sendall(b"x")
            assert near.recv(1) == b"x"
    finally:
        for each in pairs:
            for end in each:
                end.close()


def test_the_oldest_may_have_been_reset():
    unproved, (near, far), (other, last) = UnprovedConnections(1), pair(), pair()
    unproved.add(far)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    near.close()
    with pytest.raises(ConnectionResetError):
        far.recv(1)
    unproved.add(last)
    last.sendall(b"x")
    assert other.recv(1) == b"x"
    for each in (far, other, last):
        each.close()
