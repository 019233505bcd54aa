"""Who may connect to the ranks of a model over a network: a mutual challenge, answered with a shared key.

The two sides prove that they have the key of the same Secret, without sending it (HMAC-SHA256 over what both
have drawn). Without a Secret the key is empty: the exchange then keeps out what is no rank, and nothing else.
Messages have fixed sizes and are read before anything is parsed. Knows no frames.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from pathlib import Path

from quire_server import peer_auth
from quire_server.peer_auth import PeerKeyError

_MAGIC = b"quire-ranks/1\n\0\0"
_NONCE_BYTES = 32
_DIGEST_BYTES = hashlib.sha256().digest_size
SECONDS = 5.0  # for the whole exchange


class RankAuthError(Exception):
    """The other side is no rank, or has another key."""


def key_of(directory: Path | None) -> bytes:
    """The key of the group (``peer_auth``). Raises RankAuthError where there is none."""
    try:
        return peer_auth.read_key(directory)
    except PeerKeyError as error:
        raise RankAuthError(str(error)) from None


def admit(connection: socket.socket, key: bytes, seconds: float = SECONDS) -> None:
    """As the leader, let the other side prove that it has the key, then prove it as well. Raises
    RankAuthError.
    """
    until, own = time.monotonic() + seconds, secrets.token_bytes(_NONCE_BYTES)
    _send(connection, _MAGIC + own, until)
    answer = _receive(connection, _NONCE_BYTES + _DIGEST_BYTES, until)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"worker", own, theirs)):
        raise RankAuthError("the other side has another key")
    _send(connection, _proof(key, b"leader", own, theirs), until)


def enter(connection: socket.socket, key: bytes, seconds: float = SECONDS) -> None:
    """As a worker, prove to the leader that this side has the key, and see that it has it. Raises
    RankAuthError.
    """
    until, own = time.monotonic() + seconds, secrets.token_bytes(_NONCE_BYTES)
    greeting = _receive(connection, len(_MAGIC) + _NONCE_BYTES, until)
    magic, theirs = greeting[: len(_MAGIC)], greeting[len(_MAGIC) :]
    if magic != _MAGIC:
        raise RankAuthError("what listens there is no leader of ranks, or one of another version")
    _send(connection, own + _proof(key, b"worker", theirs, own), until)
    if not hmac.compare_digest(
        _receive(connection, _DIGEST_BYTES, until), _proof(key, b"leader", theirs, own)
    ):
        raise RankAuthError("the leader has another key")


def _proof(key: bytes, role: bytes, of_leader: bytes, of_worker: bytes) -> bytes:
    return hmac.digest(key or b"\0", _MAGIC + role + of_leader + of_worker, "sha256")


def _send(connection: socket.socket, data: bytes, until: float) -> None:
    connection.settimeout(max(1e-3, until - time.monotonic()))
    try:
        connection.sendall(data)
    except OSError as error:
        raise RankAuthError(f"the other side does not listen ({error})") from None


def _receive(connection: socket.socket, size: int, until: float) -> bytes:
    """Exactly so many bytes: what follows them is not for this exchange."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(1e-3, until - time.monotonic()))
        try:
            part = connection.recv(size - len(data))
        except OSError as error:
            raise RankAuthError(f"the other side said nothing ({error})") from None
        if not part:
            raise RankAuthError("the other side has closed the connection, as one with another key does")
        data += part
    return data
