"""What crosses the socket between the API process and the engine: one message per step and direction.

Called by `inbox` and `client`. A frame is a 4-byte length and a msgpack array `[tag, fields]`; whatever else
arrives is a CodecError and costs the sender its connection, never the receiver its life.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire_server.core.engine_stats import EngineStats
from quire_server.core.request import Request
from quire_server.core.step import TokenEvent
from quire_server.engine.codec import CodecError, decoder, encode, unpack

MAX_FRAME_BYTES = 32 * 1024 * 1024
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class EngineInfo:
    """What the API process has to know of the engine: sent once, when it connects."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    gpu_memory: tuple[tuple[str, int], ...] = ()  # bytes by what takes them
    load_seconds: float = 0.0  # from its start until the weights were in place

    @property
    def kv_capacity(self) -> int:
        """Tokens that the KV cache can hold."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True)
class Inbox:
    """To the engine: requests to add and requests to drop; before them, whether to forget what is cached."""

    requests: tuple[Request, ...] = ()
    aborts: tuple[str, ...] = ()
    reset_cache: bool = False
    ended: tuple[str, ...] = ()  # to drop as well: their answers are complete, by a stop string


class Outbox(NamedTuple):
    """From the engine: what one step did, or (with no events) its sign of life.

    Most requests gained a token and nothing else: those are two columns of equal length.
    """

    events: tuple[TokenEvent, ...]
    stats: EngineStats
    request_ids: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


Message = EngineInfo | Inbox | Outbox

_TAGS: dict[type, int] = {EngineInfo: 1, Inbox: 2, Outbox: 3}
_DECODERS: dict[int, Callable[[Any], Message]] = {
    1: decoder(EngineInfo),
    2: decoder(Inbox),
    3: decoder(Outbox),
}


def to_frame(message: Message) -> bytes:
    """The bytes of one message."""
    body = encode((_TAGS[type(message)], message))
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes. Raises CodecError; the stream is of no use afterwards."""
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise CodecError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(_decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages


def _decode(body: bytes) -> Message:
    value = unpack(body)
    if type(value) is not list or len(value) != 2 or type(value[0]) is not int or value[0] not in _DECODERS:
        raise CodecError("expected [tag, fields]")
    return _DECODERS[value[0]](value[1])
