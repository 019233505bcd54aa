"""Mutual proof that both ends of a connection have the same key, before anything else is said.

A challenge and a response by HMAC, each over the numbers of both sides, so that no recorded answer is of use.
The key is that of ``peer_auth``. While pods see different versions of its Secret, the handshake fails and
prompts are computed locally. Without a Secret the key is empty: then only the network protects.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from quire_server import peer_auth
from quire_server.core.transfer import TransferError
from quire_server.kv_transfer import frames
from quire_server.kv_transfer.channel import Channel
from quire_server.kv_transfer.frames import NONCE_BYTES, Challenge, Kind, Proof, Welcome
from quire_server.peer_auth import PeerKeyError

SECONDS = 1.0
_LONGEST_VALUE = 24  # characters, in a message


def read_key(directory: Path | None) -> bytes:
    """The key of transfers (``peer_auth``). Raises TransferError where there is none."""
    try:
        return peer_auth.read_key(directory)
    except PeerKeyError as error:
        raise TransferError(str(error)) from None


def accept(channel: Channel, key: bytes, layout: bytes, incarnation: bytes, load: int) -> None:
    """The producer's side. Raises TransferError for a consumer without the key or with other blocks; what it
    says is for the consumer as well.
    """
    deadline = time.monotonic() + SECONDS
    challenge = Challenge(secrets.token_bytes(NONCE_BYTES), incarnation)
    channel.send(Kind.CHALLENGE, frames.pack_challenge(challenge), deadline=deadline)
    proof = frames.parse_proof(channel.receive(Kind.PROOF, deadline=deadline)[1])
    if not hmac.compare_digest(proof.mac, _mac(key, b"consumer", challenge, proof.nonce, proof.layout)):
        raise TransferError("the consumer does not have the same key")
    if proof.layout != layout:
        raise TransferError(f"the consumer has other KV blocks: {difference(proof.layout, layout)}")
    mac = _mac(key, b"producer", challenge, proof.nonce, layout)
    channel.send(Kind.WELCOME, frames.pack_welcome(Welcome(mac, load)), deadline=deadline)


def difference(theirs: bytes, ours: bytes) -> str:
    """The lines of name and value that differ between two layouts, in words. Long values are digests."""
    found, wanted = (
        {line.partition("=")[0]: line for line in layout.decode(errors="replace").splitlines()}
        for layout in (theirs, ours)
    )
    names = [name for name in sorted(found | wanted) if found.get(name) != wanted.get(name)]
    return ", ".join(f"{name} {_value(found, name)} and not {_value(wanted, name)}" for name in names)


def _value(lines: Mapping[str, str], name: str) -> str:
    value = lines.get(name, "").partition("=")[2]
    return value if len(value) <= _LONGEST_VALUE else f"{value[:8]}..."


class Producer(NamedTuple):
    """Which process a producer is, and how many requests it has."""

    incarnation: bytes
    load: int


def introduce(channel: Channel, key: bytes, layout: bytes) -> Producer:
    """The consumer's side. Raises TransferError for a producer without the key."""
    deadline = time.monotonic() + SECONDS
    challenge = frames.parse_challenge(channel.receive(Kind.CHALLENGE, deadline=deadline)[1])
    nonce = secrets.token_bytes(NONCE_BYTES)
    proof = Proof(nonce, _mac(key, b"consumer", challenge, nonce, layout), layout)
    channel.send(Kind.PROOF, frames.pack_proof(proof), deadline=deadline)
    welcome = frames.parse_welcome(channel.receive(Kind.WELCOME, deadline=deadline)[1])
    if not hmac.compare_digest(welcome.mac, _mac(key, b"producer", challenge, nonce, layout)):
        raise TransferError("the producer does not have the same key")
    return Producer(challenge.incarnation, welcome.load)


def _mac(key: bytes, role: bytes, challenge: Challenge, nonce: bytes, layout: bytes) -> bytes:
    return hmac.digest(key, role + challenge.nonce + challenge.incarnation + nonce + layout, "sha256")
