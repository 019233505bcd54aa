"""From token events to text: runs the answers of one request and hands out pieces as they become certain.

Called by `completions`; the streamed and the whole response are made of the same pieces, so they cannot
differ. Knows the detokenizer and the engine's client; knows no HTTP and no JSON shape.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire_server.api.admission import Place
from quire_server.api.degradation import DEADLINE, Degradation
from quire_server.api.generation_fields import TextRules
from quire_server.api.tracing import RequestSpan
from quire_server.core.request import FinishReason, Request
from quire_server.core.step import TokenEvent, TokenLogprobs
from quire_server.core.timing import Timing
from quire_server.engine.client import DeadlineExceededError, EngineClient
from quire_server.metrics import Metrics
from quire_server.text.detokenizer import IncrementalDetokenizer
from quire_server.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """What one answer gained. A NamedTuple, as TokenEvent: there is one for each token."""

    answer: int  # which of the request's
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    num_tokens: int
    num_cached_tokens: int
    finish_reason: str | None  # set on the last piece
    stop_reason: str | int | None = None  # the stop string or stop token that the client named
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    token_ms: tuple[float, ...] = ()  # since the request's arrival, for each token, where asked for


Emit = Callable[[Piece], Awaitable[None]]


@dataclass(frozen=True)
class Desk:
    """Where the answers of one request are made."""

    engine: EngineClient
    tokenizer: Tokenizer
    metrics: Metrics
    place: Place
    arrived_at: float
    timeout: float  # seconds from the arrival on; may be infinite
    rules: TextRules
    degradation: Degradation
    span: RequestSpan
    lose: Callable[[int], None]  # told of tokens that came for an answer that was cut before they were said
    keeps_begun: bool = True  # at its deadline an answer that has begun ends with what it has
    is_timed: bool = False  # the client wants to know when each token came
    is_whole: bool = False  # nobody sees a part of an answer before its end
    scores_only: bool = False  # no token was asked for: the one that the engine cannot but give is dropped


def second_try(desk: Desk, requests: Sequence[Request], now: float) -> tuple[Desk, list[Request]]:
    """The same for half of the tokens, with as much time again; what has begun by then is kept."""
    halved = []
    for request in requests:
        sampling = request.sampling
        max_tokens = -(-sampling.max_tokens // 2)
        sampling = replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))
        halved.append(replace(request, request_id=f"{request.request_id}-again", sampling=sampling))
    return replace(desk, timeout=now - desk.arrived_at + desk.timeout, keeps_begun=True), halved


async def answer_all(desk: Desk, requests: Sequence[Request], emit: Emit) -> None:
    """Run every answer at once; the first failure ends them all."""
    if len(requests) == 1:
        lengths = [await _answer(desk, 0, requests[0], emit)]
    else:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_answer(desk, index, request, emit))
                    for index, request in enumerate(requests)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        lengths = [task.result() for task in tasks]
    if desk.metrics.answers is not None:
        desk.metrics.answers.longest(max(lengths))


async def _answer(desk: Desk, index: int, request: Request, emit: Emit) -> int:
    """Run one answer; returns its number of tokens."""
    rules = desk.rules
    detokenizer = IncrementalDetokenizer(
        desk.tokenizer,
        rules.stop,
        skip_special_tokens=rules.skip_special_tokens,
        include_stop=rules.include_stop,
        min_tokens=rules.min_tokens,
    )
    deadline, is_whole = desk.arrived_at + desk.timeout, desk.is_whole and not rules.stop
    watch = _Stopwatch(desk, index, len(request.prompt_token_ids))
    async with desk.engine.submit(request, deadline, watch.came, is_whole=is_whole) as events, watch:
        finish_reason: str | None = None
        while finish_reason is None:
            try:
                event = await events.next()
            except DeadlineExceededError:
                if not watch.has_begun or not desk.keeps_begun:
                    raise
                # What has been said is worth something: the answer ends here, as if by its length.
                event = TokenEvent(request.request_id, (), finish_reason=FinishReason.LENGTH)
                desk.metrics.answer_cut()
                desk.degradation.note(DEADLINE)
            piece = _scored(index, event) if desk.scores_only else _piece(index, event, detokenizer, rules)
            finish_reason = piece.finish_reason
            events.is_complete = finish_reason == FinishReason.STOP
            if piece.stop_reason is None and piece.finish_reason == FinishReason.STOP:
                piece = piece._replace(stop_reason=_stop_token(desk, request, event))
            watch.see(event, piece)
            if desk.is_timed:
                piece = piece._replace(token_ms=watch.milliseconds(piece))
            await emit(piece)
    desk.metrics.choice_finished(finish_reason)
    return watch.num_tokens


class _Stopwatch:
    """Where the time of one answer goes: told to its span, and to the metrics when it ends well."""

    def __init__(self, desk: Desk, index: int, prompt_tokens: int) -> None:
        self._desk = desk
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._timing: Timing | None = None
        self._last_token_at = 0.0
        self._times: list[float] = []  # of the tokens that came, where the client wants to know
        self._num_came = 0
        self.num_tokens = 0  # that were said

    @property
    def has_begun(self) -> bool:
        """Whether a token came."""
        return self._num_came > 0

    def came(self, num_tokens: int, at: float) -> None:
        """The engine sent tokens: for the metrics, whenever they will be looked at."""
        desk = self._desk
        if desk.scores_only:
            return
        if self._num_came:
            desk.metrics.steps.generated(num_tokens, (at - self._last_token_at) / num_tokens)
        else:
            desk.place.begin(self._index)
            desk.metrics.first_token(at - desk.arrived_at, desk.span.exemplar)
            desk.metrics.steps.generated(num_tokens, None)
        self._num_came += num_tokens
        self._last_token_at = at
        if desk.is_timed:
            self._times += [at] * num_tokens

    async def __aenter__(self) -> _Stopwatch:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._desk.lose(self._num_came - self.num_tokens)
            is_given_up = issubclass(kind, asyncio.CancelledError | DeadlineExceededError)
            self._desk.metrics.choice_finished(FinishReason.ABORT if is_given_up else FinishReason.ERROR)
        if self._timing is None:
            return  # the engine said nothing of it
        timing, desk = self._timing, self._desk
        if (
            timing.finished is None
        ):  # it was ended on this side: by a stop string, by its deadline, by its client
            timing = replace(timing, finished=time.monotonic())
        desk.span.answered(self._index, timing)
        if kind is None and desk.metrics.answers is not None:
            desk.metrics.answers.finished(self._prompt_tokens, self.num_tokens, timing, desk.span.exemplar)

    def see(self, event: TokenEvent, piece: Piece) -> None:
        """Take in what came."""
        self._timing = event.timing or self._timing
        self.num_tokens += piece.num_tokens

    def milliseconds(self, piece: Piece) -> tuple[float, ...]:
        """Of the piece's tokens, since the arrival of the request."""
        mine = self._times[self.num_tokens - piece.num_tokens : self.num_tokens]
        return tuple([round((at - self._desk.arrived_at) * 1000, 3) for at in mine])


def _scored(index: int, event: TokenEvent) -> Piece:
    """Of an event whose tokens nobody asked for."""
    reason = None if event.finish_reason is None else str(FinishReason.LENGTH)
    return Piece(index, "", (), 0, event.num_cached_tokens, reason, prompt_logprobs=event.prompt_logprobs)


def _stop_token(desk: Desk, request: Request, event: TokenEvent) -> int | None:
    """The stop token that ended the text, unless it is the model's own end."""
    sampling, token_id = request.sampling, event.token_ids[-1]
    is_own = not sampling.ignore_eos and token_id in desk.tokenizer.eos_token_ids
    return token_id if token_id in sampling.stop_token_ids and not is_own else None


def _piece(index: int, event: TokenEvent, detokenizer: IncrementalDetokenizer, rules: TextRules) -> Piece:
    """The text of an event. With stop strings token by token, so that none after the stop is counted."""
    ids = event.token_ids
    is_ended = event.finish_reason is FinishReason.STOP
    spoken = ids[:-1] if is_ended and not rules.include_stop else ids  # the stop token is no text
    text, used = "", len(ids)
    if rules.stop:
        for position, token_id in enumerate(spoken):
            text += detokenizer.push((token_id,))
            if detokenizer.stopped is not None:
                used = position + 1
                break
    else:
        text = detokenizer.push(spoken)
    reason = None if event.finish_reason is None else str(event.finish_reason)
    if reason is not None and detokenizer.stopped is None:
        text += detokenizer.finish()
    if detokenizer.stopped is not None:
        reason = str(FinishReason.STOP)
    weighed = ids if rules.weigh_stop else spoken
    logprobs = (event.logprobs or ())[: min(used, len(weighed))]
    return Piece(
        index,
        text,
        logprobs,
        used,
        event.num_cached_tokens,
        reason,
        detokenizer.stopped,
        event.prompt_logprobs,
    )
