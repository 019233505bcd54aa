"""/v1/chat/completions and /v1/completions: parse, reserve a place, tokenise, generate, deliver.

Called by `app`. The order matters: the place is reserved before any work is done for the request, and it is
given back whatever happens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from quire_server.api import calls, span_attributes, token_timing
from quire_server.api.admission import Newcomer, Place
from quire_server.api.calls import ChatCall, CompletionCall
from quire_server.api.degradation import HALVED
from quire_server.api.delivery import Streamed, Whole
from quire_server.api.engine_requests import Prompt, engine_requests
from quire_server.api.errors import overloaded
from quire_server.api.fields import parse_object
from quire_server.api.generation import Desk, answer_all, second_try
from quire_server.api.generation_fields import Generation
from quire_server.api.house import House
from quire_server.api.reply import Reply
from quire_server.api.shapes import ChatShape, CompletionShape, Header, Shape
from quire_server.api.visit import Visit, account
from quire_server.core.request import Request
from quire_server.engine.client import DeadlineExceededError
from quire_server.engine.messages import EngineInfo


async def chat(house: House, reply: Reply) -> None:
    """The handler of /v1/chat/completions."""
    await account(Visit(house, reply), _chat)


async def complete(house: House, reply: Reply) -> None:
    """The handler of /v1/completions."""
    await account(Visit(house, reply), _complete)


async def _chat(visit: Visit) -> None:
    house = visit.house
    body = parse_object(await visit.reply.body())
    info = house.engine.info
    call = calls.parse_chat(body, house.defaults, info.vocab_size)
    if visit.transcript is not None:
        visit.transcript.keep_messages(call.messages)
    place = _reserve(visit, call, call.generation.n, info)
    try:
        await visit.reply.run(_chat_answer(visit, call, place, info), house.drain.cut)
    finally:
        place.leave()


def _reserve(visit: Visit, call: ChatCall | CompletionCall, num_answers: int, info: EngineInfo) -> Place:
    """A place in the house, for a request that it serves."""
    house, generation, client = visit.house, call.generation, visit.client
    house.check_model(generation.model)
    house.check_priority(generation.priority)
    visit.is_timed = token_timing.is_wanted(visit.reply)
    operation = span_attributes.OPERATIONS[visit.reply.scope["path"]]
    visit.span.describe(f"{operation} {generation.model}", span_attributes.asked(generation))
    newcomer = Newcomer(
        client=client,
        num_answers=num_answers,
        prompt_tokens=call.rough_tokens,
        priority=generation.priority,
    )
    house.rates.enter(client, call.rough_tokens)
    visit.charged_tokens = call.rough_tokens
    place = house.admission.reserve(newcomer, info, house.engine.stats)
    visit.reply.headers += house.rates.headers(client)
    return place


async def _chat_answer(visit: Visit, call: ChatCall, place: Place, info: EngineInfo) -> None:
    generation = call.generation
    prompt = await visit.house.tokenize_chat(call.messages)
    header = Header(f"chatcmpl-{visit.response_id}", int(time.time()), generation.model)
    asked = generation.sampling
    shape = ChatShape(
        header, visit.house.tokenizer, asked.logprobs is not None, asked.prompt_logprobs is not None
    )
    await _generate(visit, generation, [prompt], place, info, shape, leads=("",) * generation.n)


async def _complete(visit: Visit) -> None:
    house = visit.house
    body = parse_object(await visit.reply.body())
    info = house.engine.info
    call = calls.parse_completion(body, house.defaults, info.vocab_size)
    if visit.transcript is not None:
        visit.transcript.keep_prompts(call.prompts)
    place = _reserve(visit, call, call.generation.n * len(call.prompts), info)
    try:
        await visit.reply.run(_completion_answer(visit, call, place, info), house.drain.cut)
    finally:
        place.leave()


async def _completion_answer(visit: Visit, call: CompletionCall, place: Place, info: EngineInfo) -> None:
    house, generation = visit.house, call.generation
    prompts = [
        await house.tokenize(prompt, special=True) if isinstance(prompt, str) else prompt
        for prompt in call.prompts
    ]
    leads = [""] * len(prompts)
    if call.echo:
        leads = [
            source if isinstance(source, str) else await house.detokenize(source, skip_special_tokens=True)
            for source in call.prompts
        ]
    each = tuple(lead for lead in leads for _ in range(generation.n))
    header = Header(f"cmpl-{visit.response_id}", int(time.time()), generation.model)
    asked = generation.sampling
    shape = CompletionShape(
        header,
        house.tokenizer,
        with_logprobs=asked.logprobs is not None,
        leads=each,
        scored=prompts if call.scores_prompt else (),
        with_prompt_logprobs=asked.prompt_logprobs is not None and not call.scores_prompt,
    )
    await _generate(visit, generation, prompts, place, info, shape, leads=each)


async def _generate(
    visit: Visit,
    generation: Generation,
    prompts: Sequence[Prompt],
    place: Place,
    info: EngineInfo,
    shape: Shape,
    *,
    leads: tuple[str, ...],
) -> None:
    house = visit.house
    grammar = await house.compile(generation.form)
    requests = engine_requests(
        visit.response_id,
        visit.arrived_at,
        generation,
        prompts,
        tokenizer=house.tokenizer,
        info=info,
        default_max_tokens=house.defaults.max_tokens,
        grammar=grammar,
        watermark=house.watermarks(generation.watermark),
    )
    house.metrics.asked(generation.n, requests[0].sampling.max_tokens)
    place.hold(lengths := [len(request.prompt_token_ids) for request in requests])
    visit.prompt_tokens = sum(map(len, prompts))
    house.metrics.prompt_taken(visit.prompt_tokens)
    desk = _desk(visit, generation, place)

    def delivery() -> Whole | Streamed:
        if not generation.stream:
            return Whole(visit.reply, shape, leads)
        usage, counting = generation.include_usage, lengths if generation.continuous_usage else ()
        return Streamed(visit.reply, shape, len(lengths), include_usage=usage, counting=counting)

    try:
        try:
            await _deliver(visit, desk, requests, delivery())
        except DeadlineExceededError:
            if not generation.retry_on_timeout or visit.reply.started:
                raise
            visit.degradation.note(HALVED)
            await _deliver(visit, *second_try(desk, requests, time.monotonic()), delivery())
    except DeadlineExceededError as error:
        raise overloaded("deadline_exceeded", str(error), place.retry_after()) from None


def _desk(visit: Visit, generation: Generation, place: Place) -> Desk:
    house = visit.house
    return Desk(
        house.engine,
        house.tokenizer,
        house.metrics,
        place,
        visit.arrived_at,
        min(generation.timeout or house.request_timeout, house.request_timeout),
        generation.text,
        visit.degradation,
        visit.span,
        visit.lose,
        is_timed=visit.is_timed,
        is_whole=not generation.stream and visit.transcript is None,
        keeps_begun=not generation.retry_on_timeout or generation.stream,
        scores_only=generation.max_tokens == 0,
    )


async def _deliver(visit: Visit, desk: Desk, requests: Sequence[Request], delivery: Whole | Streamed) -> None:
    """Run the answers to their end; what they took counts, sent or not."""
    visit.earlier_tokens += visit.tally.completion_tokens
    visit.tally = delivery.tally
    emit = delivery.add if visit.transcript is None else visit.transcript.beside(delivery.add)
    await answer_all(desk, requests, emit)
    await delivery.finish(visit.prompt_tokens)
