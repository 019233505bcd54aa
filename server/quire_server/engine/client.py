"""The API process's client of the engine: submit a request, read its output as it comes, abort it.

All requests of one event loop iteration are sent as one message (or more, where long prompts exceed a frame).
When the connection is lost, every open request ends with EngineGoneError, and so does each new one until the
engine is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path

from quire_server.core.request import Request
from quire_server.core.stats import EngineStats
from quire_server.core.step import ADAPTER_GONE, OUT_OF_MEMORY, UNSATISFIABLE, TokenEvent
from quire_server.engine.codec import CodecError
from quire_server.engine.messages import (
    MAX_FRAME_BYTES,
    AdapterState,
    AdapterStates,
    EngineInfo,
    EngineInputs,
    EngineOutputs,
    FrameReader,
    LoadAdapter,
    Message,
    to_frame,
)
from quire_server.errors import QuireServerError, RequestError

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.05
_READ_SIZE = 1 << 18
_LONGEST_TIMER = 86_400.0  # event loops accept no infinite delay
_LOADED_ALREADY = "lora_name: is loaded already: unload it first, or choose another name"
_SUPERSEDED = "It was dropped or loaded anew while it was read."
_MESSAGE_TOKENS = MAX_FRAME_BYTES // 8  # a token has at most five bytes on the wire; for the rest, see _size


OnTokens = Callable[[int, float], None]  # (number of tokens, time of arrival by `time.monotonic`)
OnReceived = Callable[[], None]


class EngineGoneError(QuireServerError):
    """The engine is not connected: still loading, or ended."""


class DeadlineExceededError(QuireServerError):
    """The deadline of a request has passed."""


class RequestLostError(QuireServerError):
    """The engine ended this request with an error."""


class AdapterGoneError(RequestLostError):
    """The adapter of this request was dropped before the engine had it."""


class StepOutOfMemoryError(RequestLostError):
    """A step ran out of memory, and this request was dropped because it was the largest one."""


class RequestImpossibleError(RequestLostError):
    """The request's own constraints left no token to sample, or its grammar became too complex."""


class OutputStream:
    """The output of one request. Everything that arrives between two calls of ``next`` is merged into one
    event.

    ``on_tokens`` is called as soon as tokens arrive. With ``is_whole`` (not streamed) the reader is not woken
    up by tokens alone.
    """

    def __init__(self, request_id: str, on_tokens: OnTokens, *, is_whole: bool) -> None:
        self._request_id = request_id
        self._on_tokens = on_tokens
        self._is_whole = is_whole
        self.is_complete = (
            False  # set by the reader when a stop string, which the engine cannot see, completed the answer
        )
        self._events: deque[TokenEvent | QuireServerError] = deque()
        self._tokens: list[int] = []  # that arrived after the events
        self._arrival: asyncio.Future[None] | None = None  # the reader waits for it

    def put_token(self, token_id: int, at: float) -> None:
        """Add a plain token that arrived at the time ``at`` (of `time.monotonic`)."""
        self._tokens.append(token_id)
        self._on_tokens(1, at)
        if not self._is_whole:
            self._wake()

    def put(self, event: TokenEvent | QuireServerError, at: float = 0.0) -> None:
        """Add an event or the error that ends the stream; ``at`` is used only where the event has tokens."""
        if self._tokens:
            self._events.append(self._token_event())
        self._events.append(_failure(event) if isinstance(event, TokenEvent) and event.error else event)
        if isinstance(event, TokenEvent) and event.token_ids:
            self._on_tokens(len(event.token_ids), at)
        self._wake()

    async def next(self) -> TokenEvent:
        """Wait for output; returns all of it as one event. Raises the error that ended the stream."""
        while not self._events and (self._is_whole or not self._tokens):
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        if not self._events:
            return self._token_event()
        merged = self._take()
        while self._events and not isinstance(self._events[0], QuireServerError):
            event = self._take()
            merged = event._replace(
                token_ids=merged.token_ids + event.token_ids,
                logprobs=(merged.logprobs or ()) + (event.logprobs or ()),
                prompt_logprobs=merged.prompt_logprobs + event.prompt_logprobs,
                timing=event.timing or merged.timing,
            )
        return merged

    def _token_event(self) -> TokenEvent:
        tokens, self._tokens = self._tokens, []
        return TokenEvent(self._request_id, tuple(tokens))

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _take(self) -> TokenEvent:
        event = self._events.popleft()
        if isinstance(event, QuireServerError):
            raise event
        return event


def _failure(event: TokenEvent) -> RequestLostError:
    assert event.error is not None
    if event.error == OUT_OF_MEMORY:
        return StepOutOfMemoryError(event.error)
    if event.error == ADAPTER_GONE:
        return AdapterGoneError(event.error)
    if event.error in UNSATISFIABLE:
        return RequestImpossibleError(event.error)
    return RequestLostError(event.error)


class EngineClient:
    """A connection to the engine that is re-established when it is lost."""

    def __init__(
        self,
        socket_path: Path,
        on_outputs: Callable[[EngineOutputs], None],
        on_info: Callable[[EngineInfo], None] = lambda info: None,
    ) -> None:
        self._socket_path = socket_path
        self._on_outputs = on_outputs
        self._on_info = on_info
        self._streams: dict[str, OutputStream] = {}
        self._requests: list[Request] = []
        self._aborts: list[str] = []
        self._finished: list[str] = []
        self._unreceived: deque[OnReceived] = deque()  # of requests that are not in the stats yet
        self._num_received = 0
        self._writer: asyncio.StreamWriter | None = None
        self._info: EngineInfo | None = None
        self._changed = asyncio.Event()  # of ``adapters``; replaced when it is set
        self._adapter_turn = (
            asyncio.Lock()
        )  # a load or drop ends before the next one: they may be of one name
        self._load_id, self._has_begun = "", False  # of the last load; whether any states had it
        self.stats = EngineStats()
        self.adapters: Mapping[str, AdapterState] = {}  # by name

    @property
    def info(self) -> EngineInfo:
        """The engine's facts about itself; raises EngineGoneError while it is not connected."""
        if self._info is None:
            raise EngineGoneError("the model is still loading, or the engine has ended")
        return self._info

    @property
    def connected(self) -> bool:
        """Whether the engine is connected."""
        return self._info is not None

    async def run(self) -> None:
        """Connect, read, and reconnect, until cancelled."""
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(str(self._socket_path))
                await self._read(reader)
            except (OSError, CodecError) as error:
                if self._info is not None:
                    logger.error("lost the connection to the engine", extra={"why": str(error)})
            finally:
                self._disconnected()
            await asyncio.sleep(_RETRY_SECONDS)

    @contextlib.asynccontextmanager
    async def submit(
        self,
        request: Request,
        deadline: float = math.inf,
        on_tokens: OnTokens = lambda num_tokens, at: None,
        *,
        is_whole: bool = False,
        on_received: OnReceived = lambda: None,
    ) -> AsyncIterator[OutputStream]:
        """Submit a request and yield its output. Leaving the block early aborts the request, or finishes it
        where the stream is marked complete.

        ``on_received`` is called when ``stats`` begin to count the request, even after the block was left. At
        the deadline (of `time.monotonic`) the stream ends with DeadlineExceededError, whether the engine
        is busy, stuck or gone.
        """
        stream = OutputStream(request.request_id, on_tokens, is_whole=is_whole)
        if self._writer is None or self._info is None:
            raise EngineGoneError("the model is still loading, or the engine has ended")
        self._streams[request.request_id] = stream
        self._requests.append(request)
        self._unreceived.append(on_received)
        self._flush_soon()
        timer = _at(deadline, lambda: stream.put(DeadlineExceededError("the request's time is over")))
        try:
            yield stream
        finally:
            timer.cancel()
            if self._streams.pop(request.request_id, None) is not None:
                (self._finished if stream.is_complete else self._aborts).append(request.request_id)
                self._flush_soon()

    def reset_prefix_cache(self) -> None:
        """Clear the engine's prefix cache, before any request that is submitted from now on."""
        self._send(EngineInputs(reset_cache=True))

    async def load_adapter(self, name: str, path: Path, *, is_new: bool = False) -> AdapterState:
        """Have an adapter loaded from a directory; returns its state once that is done or has failed, or when
        another peer of the engine has dropped the name or loaded it anew. ``is_new``: raises RequestError
        where it answers already when this load's turn has come.
        """
        async with self._adapter_turn:
            if is_new and (before := self.adapters.get(name)) is not None and before.is_ready:
                raise RequestError(_LOADED_ALREADY, param="lora_name")
            load = LoadAdapter(name, str(path), secrets.token_hex(8))
            self._load_id, self._has_begun = load.load_id, False
            self._send(EngineInputs(adapter_loads=(load,)))
            while True:
                changed, state = self._changed, self.adapters.get(name)
                if state is not None and state.load_id == load.load_id:
                    if not state.is_loading:
                        return state
                elif self._has_begun:
                    return AdapterState(name, False, False, load.load_id, _SUPERSEDED, "", 0, 0)
                await changed.wait()
                if not self.connected:
                    raise EngineGoneError("the engine ended while it loaded the adapter")

    async def drop_adapter(self, name: str) -> None:
        """Drop an adapter: requests that have come finish, new ones are refused."""
        async with self._adapter_turn:
            self._send(EngineInputs(adapter_drops=(name,)))
            first = self.adapters.get(name)
            while first is not None and (state := self.adapters.get(name)) is not None:
                if state.load_id != first.load_id:
                    return  # another peer has loaded the name anew
                await self._changed.wait()

    def _send(self, inputs: EngineInputs) -> None:
        if self._writer is None or self._info is None:
            raise EngineGoneError("the model is still loading, or the engine has ended")
        self._writer.write(to_frame(inputs))

    def _set_adapters(self, states: Sequence[AdapterState]) -> None:
        self.adapters = {state.name: state for state in states}
        self._has_begun |= any(state.load_id == self._load_id for state in states)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _flush_soon(self) -> None:
        if len(self._requests) + len(self._aborts) + len(self._finished) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        requests, self._requests = self._requests, []
        aborts, self._aborts = self._aborts, []
        finished, self._finished = self._finished, []
        if self._writer is not None:
            for message in _messages(requests, aborts, finished):
                self._writer.write(to_frame(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = FrameReader()
        while data := await reader.read(_READ_SIZE):
            for message in frames.feed(data):
                self._receive(message)

    def _receive(self, message: Message) -> None:
        if isinstance(message, EngineInfo):
            self._info = message
            self._on_info(message)
        elif isinstance(message, EngineOutputs):
            self.stats, now = message.stats, time.monotonic()
            if len(message.request_ids) != len(message.token_ids):
                raise CodecError("the engine sent columns of different lengths")
            self._note_received(message.num_received)
            for request_id, token_id in zip(message.request_ids, message.token_ids, strict=True):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.put_token(token_id, now)
            for event in message.events:
                stream = self._streams.get(event.request_id)
                if stream is not None:
                    if event.finish_reason is not None:
                        del self._streams[event.request_id]
                    stream.put(event, now)
            self._on_outputs(message)
        elif isinstance(message, AdapterStates):
            self._set_adapters(message.states)
        else:
            raise CodecError("the engine sent what only the API process sends")

    def _note_received(self, num_received: int) -> None:
        """The engine takes requests in in the order in which they were submitted."""
        if num_received - self._num_received > len(self._unreceived):
            raise CodecError("the engine received more requests than were sent")
        for _ in range(num_received - self._num_received):
            self._unreceived.popleft()()
        self._num_received = num_received

    def _disconnected(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._info = None, None
        self._unreceived.clear()
        self._num_received = 0
        self._set_adapters(())
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(EngineGoneError("the engine ended while it worked on this request"))


def _at(deadline: float, call: Callable[[], None]) -> asyncio.TimerHandle:
    seconds = min(max(deadline - time.monotonic(), 0.0), _LONGEST_TIMER)
    return asyncio.get_running_loop().call_later(seconds, call)


def _messages(
    requests: Sequence[Request], aborts: Sequence[str], finished: Sequence[str]
) -> Iterator[EngineInputs]:
    """As few messages as possible. Aborts are in the last one, because they may refer to these requests."""
    batch: list[Request] = []
    num_tokens = 0
    for request in requests:
        num_tokens += _size(request)
        if batch and num_tokens > _MESSAGE_TOKENS:
            yield EngineInputs(tuple(batch))
            batch, num_tokens = [], _size(request)
        batch.append(request)
    yield EngineInputs(tuple(batch), tuple(aborts), finished=tuple(finished))


def _size(request: Request) -> int:
    """The size of a request on the wire, in tokens: these, and its grammar; everything else is small."""
    grammar = request.sampling.grammar
    tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    return tokens + (0 if grammar is None else len(grammar.text))
