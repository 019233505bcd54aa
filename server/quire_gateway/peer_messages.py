"""What one gateway tells another: which blocks of prompts it sent to which pod. As bytes, signed.

A message is a tag, then records: a pod's UID, how many digests, the digests. The tag is a keyed BLAKE2b with
the install's seed, so that only gateways of the install can change where others send prompts. A message that
comes twice says nothing new. Pure.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator, Sequence

MAX_BYTES = 1 << 17  # read in some 10 ms
MAX_DIGESTS = 256  # of a prompt; what follows is on the same pod anyway
_MAX_UID_BYTES = 64
_TAG_BYTES = 32
_HEAD = struct.Struct("<BH")

Record = tuple[str, Sequence[int]]


class MessageError(Exception):
    """These bytes are not a message of this install's gateways."""


def encode_record(uid: str, digests: Sequence[int]) -> bytes:
    """One choice. b"" where the pod's UID is too long to be one."""
    name, kept = uid.encode(), digests[:MAX_DIGESTS]
    if len(name) > _MAX_UID_BYTES:
        return b""
    return _HEAD.pack(len(name), len(kept)) + name + struct.pack(f"<{len(kept)}Q", *kept)


def encode(records: Sequence[bytes], key: bytes) -> bytes:
    """The message of these records."""
    body = b"".join(records)
    return _tag(body, key) + body


def decode(message: bytes, key: bytes) -> list[Record]:
    """The records of a message. Raises MessageError."""
    tag, body = message[:_TAG_BYTES], message[_TAG_BYTES:]
    if len(message) > MAX_BYTES or not hmac.compare_digest(tag, _tag(body, key)):
        raise MessageError("it is too long, or not signed with this install's seed")
    try:
        return list(_records(body))
    except (struct.error, UnicodeDecodeError) as error:
        raise MessageError(f"its records cannot be read: {error}") from None


def _records(body: bytes) -> Iterator[Record]:
    at = 0
    while at < len(body):
        length, number = _HEAD.unpack_from(body, at)
        at += _HEAD.size
        if length > _MAX_UID_BYTES or number > MAX_DIGESTS:
            raise MessageError("a record is too long")
        digests = struct.unpack_from(f"<{number}Q", body, at + length)
        yield body[at : at + length].decode("ascii"), digests
        at += length + 8 * number


def _tag(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=_TAG_BYTES).digest()
