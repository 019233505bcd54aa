"""The wire format between a producer and a consumer of KV blocks.

A frame is a fixed header (magic, kind, length of the body) and a body of packed fields; each kind has a limit
for its length, checked before anything is read. What does not fit is a TransferError, upon which the receiver
closes the connection.
"""

from __future__ import annotations

import enum
import itertools
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire_server.core.kv_division import Run
from quire_server.core.transfer import DIGEST_BYTES, ID_BYTES, Reference, TransferError

VERSION = 3
NONCE_BYTES = 32
HEADER = struct.Struct(">4sBI")
BLOCK_HEAD = struct.Struct(">II")  # of a BLOCK's body: index in the hold, CRC-32 of the bytes that follow
_MAGIC = b"QKV" + bytes([VERSION])
_CHALLENGE = struct.Struct(f">{NONCE_BYTES}s{ID_BYTES}s")
_PROOF = struct.Struct(f">{NONCE_BYTES}s{DIGEST_BYTES}s")
_WELCOME = struct.Struct(f">{DIGEST_BYTES}sI")
_PREFILL = struct.Struct(">iI")
_HELD = struct.Struct(f">{ID_BYTES}s{ID_BYTES}s{DIGEST_BYTES}sI")
_READ = struct.Struct(">I")
_LOCATION = struct.Struct(">III")
_RUN = struct.Struct(">QQI")  # of a SHARED, as many as a block has parts
_PLACES = struct.Struct(">II")
_PLACE = struct.Struct(">QI")  # of a PLACES, as many as a block has pieces
_AGENT = struct.Struct(">I")  # of an AGENT, before its metadata: their CRC-32
_MAX_PLACES = 1 << 18
_MAX_LAYOUT = 1 << 12
_MAX_METADATA = 1 << 20
_MAX_SALT_BYTES = 1 << 16
_MAX_TOKENS = 1 << 22
_MAX_RUNS = 1 << 18
MAX_FAILURE = 200  # characters


class Kind(enum.IntEnum):
    """Of a frame: who sends it, and when."""

    CHALLENGE = 1  # producer, at once
    PROOF = 2  # consumer: that it has the key, and what blocks it can use
    WELCOME = 3  # producer: that it has the key too
    PREFILL = 4  # consumer: compute these tokens, and hold their blocks
    WAIT = 5  # producer, again and again while it computes
    HELD = 6  # producer: the reference
    READ = 7  # consumer
    BLOCK = 8  # producer, for each block
    CONFIRMED = 9  # producer, after the last block: they were held all the time
    FAILED = 10  # producer: why not; it closes the connection
    SHARED = 11  # producer, after its WELCOME, to a consumer on the same host: the memory with its KV blocks
    LOCATION = 12  # producer, in place of a BLOCK: where in that memory the block is
    DONE = 13  # consumer, once it has copied the last of them
    ATTACH = 14  # consumer: it reads by NIXL
    AGENT = 15  # producer, upon that: what NIXL has to know of it
    PLACES = 16  # producer, in place of a BLOCK: the addresses of its pieces


MAX_BODY = {
    Kind.CHALLENGE: _CHALLENGE.size,
    Kind.PROOF: _PROOF.size + _MAX_LAYOUT,
    Kind.WELCOME: _WELCOME.size,
    Kind.PREFILL: _PREFILL.size + _MAX_SALT_BYTES + 4 * _MAX_TOKENS,
    Kind.WAIT: 0,
    Kind.HELD: _HELD.size,
    Kind.READ: _HELD.size + _READ.size,
    Kind.BLOCK: 1 << 30,
    Kind.CONFIRMED: 0,
    Kind.FAILED: 4 * MAX_FAILURE,
    Kind.SHARED: _RUN.size * _MAX_RUNS,
    Kind.LOCATION: _LOCATION.size,
    Kind.DONE: 0,
    Kind.ATTACH: 0,
    Kind.AGENT: _AGENT.size + _MAX_METADATA,
    Kind.PLACES: _PLACES.size + _PLACE.size * _MAX_PLACES,
}


class Challenge(NamedTuple):
    """A number that was never used before, and the producer's incarnation."""

    nonce: bytes
    incarnation: bytes


class Proof(NamedTuple):
    """The consumer's own number, the MAC of both numbers, and what the blocks are that it can use."""

    nonce: bytes
    mac: bytes
    layout: bytes


class Welcome(NamedTuple):
    """The producer's MAC, and how many requests it has."""

    mac: bytes
    load: int


class Location(NamedTuple):
    """A block in shared memory: its number in the hold, and there, and the CRC-32 of its bytes."""

    number: int
    block_id: int
    checksum: int


class Place(NamedTuple):
    """A piece of a block in the producer's memory."""

    address: int
    size: int


class Places(NamedTuple):
    """A block that is read by NIXL: its number in the hold, the CRC-32 of its bytes, and its pieces."""

    number: int
    checksum: int
    places: tuple[Place, ...]


class Prefill(NamedTuple):
    """A prefix of whole blocks to compute."""

    priority: int
    salt: str
    tokens: tuple[int, ...]


def header(kind: Kind, length: int) -> bytes:
    """The header of a frame."""
    return HEADER.pack(_MAGIC, kind, length)


def parse_header(data: bytes) -> tuple[Kind, int]:
    """Kind and length of what follows. Raises TransferError."""
    magic, kind, length = HEADER.unpack(data)
    if magic != _MAGIC:
        raise TransferError("the peer does not speak this protocol, or another version of it")
    if kind not in Kind.__members__.values() or length > MAX_BODY[Kind(kind)]:
        raise TransferError("the peer sent a frame that is unknown or too long")
    return Kind(kind), length


def pack_challenge(message: Challenge) -> bytes:
    """The body of a CHALLENGE."""
    return _CHALLENGE.pack(*message)


def parse_challenge(body: bytes) -> Challenge:
    """Raises TransferError."""
    return Challenge(*_unpack(_CHALLENGE, body))


def pack_proof(message: Proof) -> bytes:
    """The body of a PROOF."""
    return _PROOF.pack(message.nonce, message.mac) + message.layout


def parse_proof(body: bytes) -> Proof:
    """Raises TransferError."""
    nonce, mac = _unpack(_PROOF, body[: _PROOF.size])
    return Proof(nonce, mac, body[_PROOF.size :])


def pack_welcome(message: Welcome) -> bytes:
    """The body of a WELCOME."""
    return _WELCOME.pack(*message)


def parse_welcome(body: bytes) -> Welcome:
    """Raises TransferError."""
    return Welcome(*_unpack(_WELCOME, body))


def pack_prefill(message: Prefill) -> bytes:
    """The body of a PREFILL. Raises TransferError for a salt that is too long to be sent."""
    salt, tokens = message.salt.encode(), message.tokens
    if len(salt) > _MAX_SALT_BYTES or len(tokens) > _MAX_TOKENS:
        raise TransferError("the cache salt or the prompt is too long to be sent")
    return _PREFILL.pack(message.priority, len(salt)) + salt + struct.pack(f">{len(tokens)}I", *tokens)


def parse_prefill(body: bytes) -> Prefill:
    """Raises TransferError."""
    priority, salt_length = _unpack(_PREFILL, body[: _PREFILL.size])
    rest = body[_PREFILL.size :]
    salt, tokens = rest[:salt_length], rest[salt_length:]
    if len(salt) != salt_length or len(tokens) % 4 or not tokens:
        raise TransferError("the peer sent a prompt of the wrong length")
    try:
        text = salt.decode()
    except UnicodeDecodeError:
        raise TransferError("the peer sent a cache salt that is no text") from None
    return Prefill(priority, text, struct.unpack(f">{len(tokens) // 4}I", tokens))


def pack_reference(reference: Reference) -> bytes:
    """The body of a HELD."""
    return _HELD.pack(*reference)


def parse_reference(body: bytes) -> Reference:
    """Raises TransferError."""
    return Reference(*_unpack(_HELD, body))


def pack_read(reference: Reference, first: int) -> bytes:
    """The body of a READ: the held blocks from index ``first`` on."""
    return pack_reference(reference) + _READ.pack(first)


def parse_read(body: bytes) -> tuple[Reference, int]:
    """Raises TransferError."""
    return parse_reference(body[: _HELD.size]), int(_unpack(_READ, body[_HELD.size :])[0])


def pack_location(location: Location) -> bytes:
    """The body of a LOCATION."""
    return _LOCATION.pack(*location)


def parse_location(body: bytes) -> Location:
    """Raises TransferError."""
    return Location(*_unpack(_LOCATION, body))


def pack_shared(runs: Sequence[Run]) -> bytes:
    """The body of a SHARED: where in the memory the parts of a block are."""
    return b"".join(_RUN.pack(*run) for run in runs)


def parse_shared(body: bytes) -> tuple[Run, ...]:
    """Raises TransferError."""
    if len(body) % _RUN.size:
        raise TransferError("the peer sent a frame of the wrong length")
    return tuple(itertools.starmap(Run, _RUN.iter_unpack(body)))


def pack_agent(metadata: bytes) -> bytes:
    """The body of an AGENT."""
    return _AGENT.pack(zlib.crc32(metadata)) + metadata


def parse_agent(body: bytes) -> bytes:
    """The metadata. They hold addresses, and the library believes them. Raises TransferError."""
    (wanted,), metadata = _unpack(_AGENT, body[: _AGENT.size]), body[_AGENT.size :]
    if zlib.crc32(metadata) != wanted:
        raise TransferError("the description of the producer's NIXL agent has another checksum than there")
    return metadata


def pack_places(block: Places) -> bytes:
    """The body of a PLACES."""
    head = _PLACES.pack(block.number, block.checksum)
    return head + b"".join(_PLACE.pack(*place) for place in block.places)


def parse_places(body: bytes) -> Places:
    """Raises TransferError."""
    number, found = _unpack(_PLACES, body[: _PLACES.size])
    if (len(body) - _PLACES.size) % _PLACE.size:
        raise TransferError("the peer sent a frame of the wrong length")
    return Places(number, found, tuple(map(Place._make, _PLACE.iter_unpack(body[_PLACES.size :]))))


def _unpack(fields: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) != fields.size:
        raise TransferError("the peer sent a frame of the wrong length")
    return fields.unpack(body)
