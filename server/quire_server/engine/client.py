"""The API process's view of the engine: submit a request, iterate over what it produces, abort it.

Called by `api`. Everything that is asked within one turn of the event loop goes out as one message (or more,
where prompts are so long that a frame cannot hold them). When the engine goes away every open request ends
with EngineGoneError, and so does each new one until it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

from quire_server.core.engine_stats import EngineStats
from quire_server.core.errors import QuireServerError
from quire_server.core.request import Request
from quire_server.core.step import IMPOSSIBLE, OUT_OF_MEMORY, TokenEvent
from quire_server.engine.codec import CodecError
from quire_server.engine.messages import (
    MAX_FRAME_BYTES,
    EngineInfo,
    FrameReader,
    Inbox,
    Message,
    Outbox,
    to_frame,
)

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.05
_READ_SIZE = 1 << 18
_LONGEST_TIMER = 86_400.0  # event loops take no infinite delays
_MESSAGE_TOKENS = MAX_FRAME_BYTES // 8  # a token takes five bytes at most; of the rest, see _size


OnTokens = Callable[[int, float], None]  # (how many, when they came by `time.monotonic`)


class EngineGoneError(QuireServerError):
    """The engine is not there (yet, or any more)."""


class DeadlineExceededError(QuireServerError):
    """The time that a request was given is over."""


class RequestLostError(QuireServerError):
    """The engine could not finish this request; the message says why."""


class StepOutOfMemoryError(RequestLostError):
    """This request was the largest of a step for which there was no memory, and was given up for the rest."""


class RequestImpossibleError(RequestLostError):
    """What the request asks for left no token that could come next, or none that could be found."""


class Answer:
    """The events of one request. Those that came while nobody looked are given together.

    ``on_tokens`` is told at once of tokens, and when they came. The reader of a whole answer is not woken for
    tokens alone.
    """

    def __init__(self, request_id: str, on_tokens: OnTokens, *, is_whole: bool) -> None:
        self._request_id = request_id
        self._on_tokens = on_tokens
        self._is_whole = is_whole
        self.is_complete = False  # the reader says so, where the engine cannot see it: a stop string came
        self._events: deque[TokenEvent | QuireServerError] = deque()
        self._tokens: list[int] = []  # that came after the events
        self._arrival: asyncio.Future[None] | None = None  # what the reader waits for, if it does

    def put_token(self, token_id: int, at: float) -> None:
        """Called by the client."""
        self._tokens.append(token_id)
        self._on_tokens(1, at)
        if not self._is_whole:
            self._wake()

    def put(self, event: TokenEvent | QuireServerError, at: float = 0.0) -> None:
        """Called by the client; ``at`` (of `time.monotonic`) counts for tokens only."""
        if self._tokens:
            self._events.append(self._plain())
        self._events.append(_failure(event) if isinstance(event, TokenEvent) and event.error else event)
        if isinstance(event, TokenEvent) and event.token_ids:
            self._on_tokens(len(event.token_ids), at)
        self._wake()

    async def next(self) -> TokenEvent:
        """Everything new, as one event."""
        while not self._events and (self._is_whole or not self._tokens):
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        if not self._events:
            return self._plain()
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

    def _plain(self) -> TokenEvent:
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
    if event.error in IMPOSSIBLE:
        return RequestImpossibleError(event.error)
    return RequestLostError(event.error)


class EngineClient:
    """One connection to the engine, kept up in the background."""

    def __init__(
        self,
        socket_path: Path,
        on_outbox: Callable[[Outbox], None],
        on_info: Callable[[EngineInfo], None] = lambda info: None,
    ) -> None:
        self._socket_path = socket_path
        self._on_outbox = on_outbox
        self._on_info = on_info
        self._answers: dict[str, Answer] = {}
        self._requests: list[Request] = []
        self._aborts: list[str] = []
        self._ended: list[str] = []
        self._writer: asyncio.StreamWriter | None = None
        self._info: EngineInfo | None = None
        self.stats = EngineStats()

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself; raises EngineGoneError while it is not connected."""
        if self._info is None:
            raise EngineGoneError("the model is still loading, or the engine has ended")
        return self._info

    @property
    def connected(self) -> bool:
        """True while the engine is there."""
        return self._info is not None

    async def run(self) -> None:
        """Connect, read, and connect again; until cancelled."""
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(str(self._socket_path))
                await self._read(reader)
            except (OSError, CodecError) as error:
                if self._info is not None:
                    logger.error("lost the engine", extra={"why": str(error)})
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
    ) -> AsyncIterator[Answer]:
        """The answer of a request; leaving the block early aborts it, or ends it where it is complete.
        For the rest see Answer.

        At the deadline (of `time.monotonic`) the answer ends with DeadlineExceededError, whether the engine
        is busy, stuck or gone.
        """
        answer = Answer(request.request_id, on_tokens, is_whole=is_whole)
        if self._writer is None or self._info is None:
            raise EngineGoneError("the model is still loading, or the engine has ended")
        self._answers[request.request_id] = answer
        self._requests.append(request)
        self._flush_soon()
        timer = _at(deadline, lambda: answer.put(DeadlineExceededError("the request's time is over")))
        try:
            yield answer
        finally:
            timer.cancel()
            if self._answers.pop(request.request_id, None) is not None:
                (self._ended if answer.is_complete else self._aborts).append(request.request_id)
                self._flush_soon()

    def reset_prefix_cache(self) -> None:
        """Have the engine forget what it has cached, before anything that is asked from now on."""
        if self._writer is None or self._info is None:
            raise EngineGoneError("the model is still loading, or the engine has ended")
        self._writer.write(to_frame(Inbox(reset_cache=True)))

    def _flush_soon(self) -> None:
        if len(self._requests) + len(self._aborts) + len(self._ended) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        requests, self._requests = self._requests, []
        aborts, self._aborts = self._aborts, []
        ended, self._ended = self._ended, []
        if self._writer is not None:
            for message in _messages(requests, aborts, ended):
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
        elif isinstance(message, Outbox):
            self.stats, now = message.stats, time.monotonic()
            if len(message.request_ids) != len(message.token_ids):
                raise CodecError("the engine sent columns of different lengths")
            for request_id, token_id in zip(message.request_ids, message.token_ids, strict=True):
                if (answer := self._answers.get(request_id)) is not None:
                    answer.put_token(token_id, now)
            for event in message.events:
                answer = self._answers.get(event.request_id)
                if answer is not None:
                    if event.finish_reason is not None:
                        del self._answers[event.request_id]
                    answer.put(event, now)
            self._on_outbox(message)
        else:
            raise CodecError("the engine sent what only the API process sends")

    def _disconnected(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._info = None, None
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.put(EngineGoneError("the engine ended while it worked on this request"))


def _at(deadline: float, call: Callable[[], None]) -> asyncio.TimerHandle:
    seconds = min(max(deadline - time.monotonic(), 0.0), _LONGEST_TIMER)
    return asyncio.get_running_loop().call_later(seconds, call)


def _messages(requests: Sequence[Request], aborts: Sequence[str], ended: Sequence[str]) -> Iterator[Inbox]:
    """As few as frames can hold. What is to be dropped goes last: it may be among the requests."""
    batch: list[Request] = []
    num_tokens = 0
    for request in requests:
        num_tokens += _size(request)
        if batch and num_tokens > _MESSAGE_TOKENS:
            yield Inbox(tuple(batch))
            batch, num_tokens = [], _size(request)
        batch.append(request)
    yield Inbox(tuple(batch), tuple(aborts), ended=tuple(ended))


def _size(request: Request) -> int:
    """Of a request on the wire, in tokens: its prompt and its grammar; all else is small."""
    grammar = request.sampling.grammar
    return len(request.prompt_token_ids) + (0 if grammar is None else len(grammar.text))
