"""The messages between the API process and the engine: one per step and direction.

A frame is a 4-byte length and a msgpack array `[tag, fields]`. Anything else is a CodecError, upon which the
receiver closes the connection and continues.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire_server.core.request import Request
from quire_server.core.stats import EngineStats
from quire_server.core.step import TokenEvent
from quire_server.engine.codec import CodecError, decoder, encode, unpack

MAX_FRAME_BYTES = 32 * 1024 * 1024
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class EngineInfo:
    """Facts about the engine that the API process needs; the first message of every connection."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    gpu_memory: tuple[tuple[str, int], ...] = ()  # bytes by purpose
    load_seconds: float = 0.0  # from process start until the weights were loaded
    pooling: str = ""  # embed: vectors of ``embedding_size``; score: one number for a pair; empty: generates
    embedding_size: int = 0
    shares_prompts: bool = False  # equal prompts that come together are computed once

    def num_shared_tokens(self, length: int) -> int:
        """Of a prompt of this length, what further answers to it need no KV cache for: its full blocks, but
        for that of its last token.
        """
        return (length - 1) // self.block_size * self.block_size if self.shares_prompts else 0

    @property
    def kv_capacity(self) -> int:
        """Tokens that the KV cache can hold."""
        return self.num_blocks * self.block_size

    @property
    def max_prompt_tokens(self) -> int:
        """What the context leaves for a prompt, beside the first token of its answer."""
        return min(self.max_model_len, self.kv_capacity) - 1


@dataclass(frozen=True)
class LoadAdapter:
    """To the engine: load an adapter from a directory. ``load_id``: by which its state is found."""

    name: str
    path: str
    load_id: str


class AdapterState(NamedTuple):
    """From the engine: one adapter. ``is_ready``: requests may name it, maybe while another content of it is
    loading or after that has failed, for this ``reason``. ``load_id``: of the last load.
    """

    name: str
    is_ready: bool
    is_loading: bool
    load_id: str
    reason: str
    digest: str
    rank: int
    size: int  # bytes


@dataclass(frozen=True)
class AdapterStates:
    """From the engine: all adapters, when any of them has changed."""

    states: tuple[AdapterState, ...] = ()


@dataclass(frozen=True)
class EngineInputs:
    """To the engine: whether to clear the prefix cache, adapters to drop and to load, then requests to add,
    then requests to drop.
    """

    requests: tuple[Request, ...] = ()
    aborts: tuple[str, ...] = ()
    reset_cache: bool = False
    finished: tuple[str, ...] = ()  # to drop as well: a stop string completed their answers
    adapter_loads: tuple[LoadAdapter, ...] = ()
    adapter_drops: tuple[str, ...] = ()


class EngineOutputs(NamedTuple):
    """From the engine: the result of one step; while it is idle, only its stats.

    A request for which a step has a token and nothing else is an entry in two columns of equal length.
    ``num_received`` counts the requests of this connection that the stats take into account.
    """

    events: tuple[TokenEvent, ...]
    stats: EngineStats
    request_ids: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    num_received: int = 0


Message = EngineInfo | EngineInputs | EngineOutputs | AdapterStates

_TAGS: dict[type, int] = {EngineInfo: 1, EngineInputs: 2, EngineOutputs: 3, AdapterStates: 4}
_DECODERS: dict[int, Callable[[Any], Message]] = {
    1: decoder(EngineInfo),
    2: decoder(EngineInputs),
    3: decoder(EngineOutputs),
    4: decoder(AdapterStates),
}


def to_frame(message: Message) -> bytes:
    """The bytes of one message."""
    body = encode((_TAGS[type(message)], message))
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits a byte stream into messages."""

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
