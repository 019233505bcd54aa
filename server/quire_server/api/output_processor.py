"""From token events to text: runs the answers of one request and emits deltas as their text becomes certain.

The streamed and the full response are made of the same deltas, so they cannot differ. Knows the detokenizer
and the engine's client; knows no HTTP and no JSON.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from quire_server.api.admission import AnswerLimits
from quire_server.api.answer_parser import AnswerParser, CallDelta
from quire_server.api.protocol.generation import TextRules
from quire_server.api.request_context import DEADLINE, RequestContext, TokenCounts
from quire_server.core.request import FinishReason, Request
from quire_server.core.stats import Timing
from quire_server.core.step import TokenEvent, TokenLogprobs
from quire_server.engine.client import DeadlineExceededError
from quire_server.text.detokenizer import IncrementalDetokenizer


class OutputDelta(NamedTuple):
    """What one answer gained. A NamedTuple, as TokenEvent, for speed: there is one for each token."""

    answer: int  # its index in the request
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    num_tokens: int
    num_cached_tokens: int
    finish_reason: str | None  # set on the last delta
    stop_reason: str | int | None = None  # the stop string or stop token that the client named
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    token_ids: tuple[int, ...] = ()  # that were counted
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    token_ms: tuple[float, ...] = ()  # since the request's arrival, for each token, where asked for


TOOL_CALLS = "tool_calls"

Emit = Callable[[OutputDelta], Awaitable[None]]


def halve(requests: Sequence[Request]) -> list[Request]:
    """The same requests, for half of the tokens."""
    halved = []
    for request in requests:
        sampling = request.sampling
        max_tokens = -(-sampling.max_tokens // 2)
        sampling = replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))
        halved.append(replace(request, request_id=f"{request.request_id}-again", sampling=sampling))
    return halved


async def answer_all(context: RequestContext, requests: Sequence[Request], emit: Emit) -> None:
    """Run every answer at once; the first failure ends them all."""
    if len(requests) == 1:
        lengths = [await _answer(context, 0, requests[0], emit)]
    else:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_answer(context, index, request, emit))
                    for index, request in enumerate(requests)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        lengths = [task.result() for task in tasks]
    if context.server.metrics.answers is not None:
        context.server.metrics.answers.longest(max(lengths))


async def _answer(context: RequestContext, index: int, request: Request, emit: Emit) -> int:
    """Run one answer; returns its number of tokens."""
    rules = context.rules
    detokenizer = IncrementalDetokenizer(
        context.server.tokenizer,
        rules.stop,
        skip_special_tokens=rules.skip_special_tokens,
        shown=rules.shown,
        include_stop=rules.include_stop,
        min_tokens=rules.min_tokens,
    )
    parser = None if context.new_parser is None else context.new_parser(index)
    given = request.output_token_ids
    if given and (ended := _take_given(context, index, request, detokenizer, parser)) is not None:
        await emit(ended)
        return len(given)
    deadline, is_whole = context.deadline, context.is_whole and not rules.stop
    timer = _AnswerTimer(context, index, len(request.prompt_token_ids))
    async with (
        context.server.engine.submit(
            request,
            deadline,
            timer.came,
            is_whole=is_whole,
            on_received=functools.partial(context.reservation.received, index),
        ) as events,
        timer,
    ):
        finish_reason: str | None = None
        while finish_reason is None:
            try:
                event = await events.next()
            except DeadlineExceededError:
                if not timer.has_begun or not context.keeps_begun:
                    raise
                # What has been generated is kept: the answer ends here, as if by its length.
                event = TokenEvent(request.request_id, (), finish_reason=FinishReason.LENGTH)
                context.server.metrics.answer_cut()
                context.degradation.note(DEADLINE)
            delta = _output(context, index, event, detokenizer, parser)
            finish_reason = delta.finish_reason
            events.is_complete = finish_reason in (FinishReason.STOP, TOOL_CALLS)
            if delta.stop_reason is None and delta.finish_reason in (FinishReason.STOP, TOOL_CALLS):
                delta = delta._replace(stop_reason=_stop_token(context, request, event))
            timer.see(event, delta)
            if context.is_timed:
                delta = delta._replace(token_ms=timer.milliseconds(delta))
            await emit(delta)
    context.server.metrics.choice_finished(finish_reason)
    limits = AnswerLimits(len(request.prompt_token_ids), request.sampling.max_tokens)
    context.server.admission.learn_answer(limits, len(given) + timer.num_tokens)
    return len(given) + timer.num_tokens


def _take_given(
    context: RequestContext,
    index: int,
    request: Request,
    detokenizer: IncrementalDetokenizer,
    parser: AnswerParser | None,
) -> OutputDelta | None:
    """Take in what another server has generated of the answer, whose text the client has; returns its end
    where it was complete.
    """
    texts = [detokenizer.push((token_id,)) for token_id in request.output_token_ids]
    context.counts.completion_tokens += len(texts)
    if parser is not None:
        context.counts.reasoning_tokens += parser.push(texts).num_reasoning
    if (end := _end_of(context, request, detokenizer.stopped)) is None:
        return None
    ended = OutputDelta(index, "", (), 0, 0, *end)
    if parser is None:
        return ended
    # What the parser has left was sent with the last token.
    return ended._replace(finish_reason=_parsed(ended, (), parser, context.counts).finish_reason)


class _AnswerTimer:
    """Measures one answer, for its span, and for the metrics when it ends well."""

    def __init__(self, context: RequestContext, index: int, prompt_tokens: int) -> None:
        self._context = context
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
        context = self._context
        if context.scores_only:
            return
        if self._num_came:
            context.server.metrics.steps.generated(num_tokens, (at - self._last_token_at) / num_tokens)
        else:
            context.reservation.begin(self._index)
            context.server.metrics.first_token(at - context.arrived_at, context.span.exemplar)
            context.server.metrics.steps.generated(num_tokens, None)
        self._num_came += num_tokens
        self._last_token_at = at
        if context.is_timed:
            self._times += [at] * num_tokens

    async def __aenter__(self) -> _AnswerTimer:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._context.counts.completion_tokens += self._num_came - self.num_tokens
            is_given_up = issubclass(kind, asyncio.CancelledError | DeadlineExceededError)
            self._context.server.metrics.choice_finished(
                FinishReason.ABORT if is_given_up else FinishReason.ERROR
            )
        if self._timing is None:
            return  # the engine said nothing of it
        timing, context = self._timing, self._context
        if (
            timing.finished is None
        ):  # it was ended on this side: by a stop string, by its deadline, by its client
            timing = replace(timing, finished=time.monotonic())
        context.span.answered(self._index, timing)
        if kind is None and context.server.metrics.answers is not None:
            context.server.metrics.answers.finished(
                self._prompt_tokens, self.num_tokens, timing, context.span.exemplar
            )

    def see(self, event: TokenEvent, delta: OutputDelta) -> None:
        """Take in what came."""
        self._timing = event.timing or self._timing
        self.num_tokens += delta.num_tokens

    def milliseconds(self, delta: OutputDelta) -> tuple[float, ...]:
        """Of the piece's tokens, since the arrival of the request."""
        mine = self._times[self.num_tokens - delta.num_tokens : self.num_tokens]
        return tuple([round((at - self._context.arrived_at) * 1000, 3) for at in mine])


def _output(
    context: RequestContext,
    index: int,
    event: TokenEvent,
    detokenizer: IncrementalDetokenizer,
    parser: AnswerParser | None,
) -> OutputDelta:
    """What an event adds to an answer."""
    if context.scores_only:
        return _scored(index, event)
    texts = _texts(event, detokenizer, context.rules, by_token=parser is not None)
    delta = _delta(index, event, detokenizer, context.rules, texts)
    return delta if parser is None else _parsed(delta, texts, parser, context.counts)


def _scored(index: int, event: TokenEvent) -> OutputDelta:
    """Of an event whose tokens are not part of the answer."""
    reason = None if event.finish_reason is None else str(FinishReason.LENGTH)
    return OutputDelta(
        index, "", (), 0, event.num_cached_tokens, reason, prompt_logprobs=event.prompt_logprobs
    )


def _parsed(
    delta: OutputDelta, texts: Sequence[str], parser: AnswerParser, counts: TokenCounts
) -> OutputDelta:
    """The delta with what its texts are. An answer that ends by itself after a call ends for the call."""
    found = parser.push(texts, is_last=delta.finish_reason is not None)
    counts.reasoning_tokens += found.num_reasoning
    reason = delta.finish_reason
    if reason == FinishReason.STOP and parser.num_calls:
        reason = TOOL_CALLS
    return delta._replace(
        text=found.content, reasoning=found.reasoning, calls=found.calls, finish_reason=reason
    )


def _end_of(
    context: RequestContext, request: Request, stopped: str | None
) -> tuple[str, str | int | None] | None:
    """Why an answer that is to go on is complete already, and what stopped it; None where it is not. The
    server that generated it was lost before it said so.
    """
    sampling, given = request.sampling, request.output_token_ids
    eos_ids = () if sampling.ignore_eos else context.server.tokenizer.eos_token_ids
    if stopped is not None:
        return str(FinishReason.STOP), stopped
    if given[-1] in {*sampling.stop_token_ids, *eos_ids} and len(given) > sampling.min_tokens:
        return str(FinishReason.STOP), None if given[-1] in eos_ids else given[-1]
    return (str(FinishReason.LENGTH), None) if len(given) >= sampling.max_tokens else None


def _stop_token(context: RequestContext, request: Request, event: TokenEvent) -> int | None:
    """The stop token that ended the text, unless it is the model's own end."""
    sampling, token_id = request.sampling, event.token_ids[-1]
    is_own = not sampling.ignore_eos and token_id in context.server.tokenizer.eos_token_ids
    return token_id if token_id in sampling.stop_token_ids and not is_own else None


def _texts(
    event: TokenEvent, detokenizer: IncrementalDetokenizer, rules: TextRules, *, by_token: bool
) -> list[str]:
    """The texts of an event's tokens, or of all together. With stop strings token by token, up to the one
    that ends the answer, so that none after it is counted. At the end of an answer the last one gains what
    the detokenizer has held back.
    """
    spoken, texts = _spoken(event, rules), list[str]()
    for token_ids in zip(spoken) if by_token or rules.stop else [spoken]:
        texts.append(detokenizer.push(token_ids))
        if detokenizer.stopped is not None:
            return texts
    if event.finish_reason is not None:
        texts.append((texts.pop() if texts else "") + detokenizer.finish())
    return texts


def _spoken(event: TokenEvent, rules: TextRules) -> Sequence[int]:
    """The tokens that are text: the stop token is none."""
    is_ended = event.finish_reason is FinishReason.STOP
    return event.token_ids[:-1] if is_ended and not rules.include_stop else event.token_ids


def _delta(
    index: int,
    event: TokenEvent,
    detokenizer: IncrementalDetokenizer,
    rules: TextRules,
    texts: list[str],
) -> OutputDelta:
    """Of an event with these texts."""
    ids = event.token_ids
    used = len(ids) if detokenizer.stopped is None else len(texts)
    reason = None if event.finish_reason is None else str(event.finish_reason)
    if detokenizer.stopped is not None:
        reason = str(FinishReason.STOP)
    scored = ids if rules.logprob_of_stop else _spoken(event, rules)
    logprobs = (event.logprobs or ())[: min(used, len(scored))]
    return OutputDelta(
        index,
        "".join(texts),
        logprobs,
        used,
        event.num_cached_tokens,
        reason,
        detokenizer.stopped,
        event.prompt_logprobs,
        tuple(ids[:used]),
    )
