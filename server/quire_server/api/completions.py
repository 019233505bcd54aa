"""Chats and completions: admit, read, parse, tokenise, generate, deliver.

The order matters: a request is admitted before its body is read, and takes its share of the queue before any
work is done for it; the share is given back whatever happens. A chat may be asked for by several APIs, which
differ in the bodies of their requests and responses alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from quire_http.errors import bad_field, overloaded
from quire_http.exchange import HttpExchange
from quire_server.api.admission import AdmissionRequest, AnswerLimits
from quire_server.api.chat_prompt import chat_prompt
from quire_server.api.context import ServerContext
from quire_server.api.input_processor import Prompt, engine_requests
from quire_server.api.output_processor import OutputDelta, answer_all, halve
from quire_server.api.protocol.generation import Generation
from quire_server.api.protocol.requests import (
    ChatCall,
    CompletionCall,
    parse_chat,
    parse_completion,
)
from quire_server.api.protocol.validation import Json
from quire_server.api.request_context import HALVED, RequestContext, account
from quire_server.api.response_formatter import (
    ChatFormatter,
    CompletionFormatter,
    FullResponse,
    Header,
    Response,
    ResponseFormatter,
    StreamedResponse,
)
from quire_server.core.request import Request
from quire_server.core.sampling_params import Grammar
from quire_server.engine.client import DeadlineExceededError
from quire_server.engine.messages import EngineInfo
from quire_server.model_dir.generation_config import SamplingDefaults

IGNORED_HEADER = "x-quire-ignored"

Call = TypeVar("Call", ChatCall, CompletionCall)


@dataclass(frozen=True)
class ChatApi:
    """What is different between the APIs for chats. ``fields``: the names in its requests of what it has by
    another name.
    """

    prefix: str  # of the ids of answers
    respond: Callable[[RequestContext, Header, Generation, Sequence[int]], Response]
    fields: Mapping[str, str] = field(default_factory=dict)
    num_kept_bytes: Callable[[], int] = int  # of the body, in memory until the answer is sent


async def chat(server: ServerContext, exchange: HttpExchange) -> None:
    """The handler of /v1/chat/completions."""
    await serve_chat(server, exchange, parse_chat, _OPENAI)


async def serve_chat(
    server: ServerContext,
    exchange: HttpExchange,
    parse: Callable[[Json, SamplingDefaults, int], ChatCall],
    api: ChatApi,
) -> None:
    """The handler of a request that an API for chats takes."""
    request = RequestContext(server, exchange)
    await account(request, _serve(request, parse, partial(_answer_chat, api)))


async def complete(server: ServerContext, exchange: HttpExchange) -> None:
    """The handler of /v1/completions."""
    request = RequestContext(server, exchange)
    await account(request, _serve(request, parse_completion, _answer_completion))


async def _serve(
    request: RequestContext,
    parse: Callable[[Json, SamplingDefaults, int], Call],
    answer: Callable[[RequestContext, Call], Coroutine[Any, Any, None]],
) -> None:
    try:
        # The call, with its texts, is the answer's alone, which drops them when they are tokenised.
        answering = answer(request, await _admit(request, parse))
        await request.exchange.run(answering, request.server.drain.cut)
    finally:
        request.reservation.release()  # before an error is sent, which a slow client may hold up


async def _admit(request: RequestContext, parse: Callable[[Json, SamplingDefaults, int], Call]) -> Call:
    """Admit a request, read and parse its body, and take its share of the queue. Raises ApiError."""
    server, client = request.server, request.client
    server.rates.check(client)
    request.reservation = server.admission.reserve(client, server.engine.info, server.engine.stats)
    call = await server.read(
        request.exchange,
        lambda body: parse(body, server.defaults, server.engine.info.vocab_size),
        server.engine.info.kv_capacity,
    )
    info = server.engine.info
    if request.transcript is not None:
        if isinstance(call, ChatCall):
            request.transcript.keep_messages(call.messages)
        else:
            request.transcript.keep_prompts(call.parts)
    generation = call.generation
    server.check_model(generation.model, request.principal)
    request.priority = server.priority(request.principal, generation.priority)
    request.configure(generation)
    # Without max_tokens an answer may fill the context.
    max_tokens = generation.max_tokens or server.defaults.max_tokens or info.max_model_len
    asked = AdmissionRequest(
        client,
        call.num_answers,
        call.estimated_tokens,
        request.priority,
        max_tokens,
        call.num_answers // generation.n,
        call.longest_prompt,
    )
    server.rates.charge(client, asked.prompt_tokens)
    request.charged_tokens = asked.prompt_tokens
    if isinstance(call, CompletionCall):  # a chat's template decides how much of its messages is read
        for prompt in call.prompts:
            if isinstance(prompt, str):
                server.check_length(prompt, server.max_prompt_tokens)
    request.reservation.claim(asked, info, server.engine.stats)
    request.exchange.headers += server.rates.headers(client)
    return call


async def _answer_chat(api: ChatApi, request: RequestContext, call: ChatCall) -> None:
    generation, server = call.generation, request.server
    request.exchange.grow_body(api.num_kept_bytes())
    chat = await chat_prompt(server, call, request.client)
    prompt = await server.tokenize(
        chat.text,
        special=False,
        limit=server.max_prompt_tokens,
        client=request.client,
        param="messages",
    )
    if chat.ignored:
        names = ", ".join(dict.fromkeys(api.fields.get(name, name) for name in chat.ignored))
        request.exchange.headers = [*request.exchange.headers, (IGNORED_HEADER, names)]
    generation = replace(
        generation,
        form=chat.grammar or generation.form,
        sampling=replace(generation.sampling, thinking=chat.budget),
    )
    header = _header(api.prefix, request, generation)
    if chat.is_parsed:
        request.rules = replace(request.rules, shown=tuple(server.shown_tokens.values()))
        request.new_parser = lambda index: chat.parser(f"{header.response_id} {index}")
    del call
    request.exchange.shrink_body(api.num_kept_bytes())
    respond = partial(api.respond, request, header, generation)
    await _generate(request, generation, [prompt], respond, prompt_field="messages")


def _chat_response(
    request: RequestContext, header: Header, generation: Generation, lengths: Sequence[int]
) -> Response:
    sampling = generation.sampling
    formatter = ChatFormatter(
        header,
        request.server.tokenizer,
        sampling.logprobs is not None,
        sampling.prompt_logprobs is not None,
    )
    return _response(request, generation, formatter, ("",) * generation.n, lengths)


_OPENAI = ChatApi("chatcmpl-", _chat_response)


async def _answer_completion(request: RequestContext, call: CompletionCall) -> None:
    server, generation = request.server, call.generation
    if call.suffix:
        prompts, generation = await _around_the_gap(request, call)
    else:
        prompts = await server.tokenize_all(
            call.prompts, limit=server.max_prompt_tokens, client=request.client
        )
    leads = [""] * len(prompts)
    if call.echo:
        leads = [
            source
            if isinstance(source, str)
            else await server.detokenize(source, skip_special_tokens=True, client=request.client)
            for source in call.prompts
        ]
    scored = prompts if call.scores_prompt else []
    del call
    request.exchange.release_body()
    lead_of_each = tuple(lead for lead in leads for _ in range(generation.n))
    header = _header("cmpl-", request, generation)
    sampling = generation.sampling

    def respond(lengths: Sequence[int]) -> Response:
        formatter = CompletionFormatter(
            header,
            server.tokenizer,
            with_logprobs=sampling.logprobs is not None,
            leads=lead_of_each,
            scored=scored,
            with_prompt_logprobs=sampling.prompt_logprobs is not None and not scored,
        )
        return _response(request, generation, formatter, lead_of_each, lengths)

    await _generate(request, generation, prompts, respond)


async def _around_the_gap(request: RequestContext, call: CompletionCall) -> tuple[list[Prompt], Generation]:
    """The prompts of what goes between two texts, and its generation, which ends where the middle does."""
    server, generation = request.server, call.generation
    if (form := server.tokenizer.fill_in_middle) is None:
        raise bad_field(
            "suffix",
            "this model's tokenizer has no tokens for filling in the middle, such as <|fim_prefix|>; leave "
            "it out, or ask a model for code",
        )
    tokenize = partial(server.tokenize, special=False, limit=server.max_prompt_tokens, client=request.client)
    suffix = await tokenize(form.marked(call.suffix), param="suffix")
    texts = [one for one in call.prompts if isinstance(one, str)]
    prompts = [form.prompt(await tokenize(text, on_the_spot=len(texts) == 1), suffix) for text in texts]
    sampling = generation.sampling
    if not sampling.ignore_eos:
        ends = dict.fromkeys((*sampling.stop_token_ids, *form.end_token_ids))
        generation = replace(generation, sampling=replace(sampling, stop_token_ids=tuple(ends)))
    return prompts, generation


def _header(prefix: str, request: RequestContext, generation: Generation) -> Header:
    """Of a new answer, or of the one that goes on."""
    if generation.resume is not None:
        return Header(generation.resume.id, generation.resume.created, generation.model)
    return Header(f"{prefix}{request.response_id}", int(time.time()), generation.model)


def _response(
    request: RequestContext,
    generation: Generation,
    formatter: ResponseFormatter,
    leads: tuple[str, ...],
    lengths: Sequence[int],
) -> Response:
    """OpenAI's; ``leads``: what the text of each answer begins with; ``lengths``: of their prompts."""
    if not generation.stream:
        return FullResponse(request.exchange, request.counts, formatter, leads)
    return StreamedResponse(
        request.exchange,
        request.counts,
        formatter,
        len(lengths) if generation.resume is None else 0,  # of which the client has no chunk yet
        include_usage=generation.include_usage,
        counting=lengths if generation.continuous_usage else (),
        num_resumed=0 if generation.resume is None else len(generation.resume.token_ids),
        ends_with_usage=request.ends_with_usage,
        names_tokens=request.names_tokens,
    )


def _answer_limits(request: Request, info: EngineInfo, *, is_first: bool) -> AnswerLimits:
    """``is_first``: of the answers to its prompt."""
    length = len(request.prompt_token_ids)
    num_shared = 0 if is_first else info.num_shared_tokens(length)
    return AnswerLimits(length, request.sampling.max_tokens, num_shared)


async def _generate(
    request: RequestContext,
    generation: Generation,
    prompts: Sequence[Prompt],
    respond: Callable[[Sequence[int]], Response],
    *,
    prompt_field: str = "prompt",
) -> None:
    """Run the answers to the prompts and send them by what ``respond`` makes of their prompts' lengths."""
    server, reservation = request.server, request.reservation
    grammar = await server.compile(generation.form, request.principal)
    requests = _engine_requests(request, generation, prompts, grammar, prompt_field)
    server.metrics.asked(generation.n, requests[0].sampling.max_tokens)
    answers = [
        _answer_limits(one, server.engine.info, is_first=number % generation.n == 0)
        for number, one in enumerate(requests)
    ]
    reservation.set_answers(answers, server.engine.stats)
    lengths = [answer.prompt_tokens for answer in answers]
    request.prompt_tokens = sum(map(len, prompts))
    server.metrics.prompt_taken(request.prompt_tokens)

    try:
        try:
            await _deliver(request, requests, respond(lengths))
        except DeadlineExceededError:
            if not generation.retry_on_timeout or request.exchange.started:
                raise
            request.degradation.note(HALVED)
            request.retry(time.monotonic())
            await _deliver(request, halve(requests), respond(lengths))
    except DeadlineExceededError as error:
        raise overloaded("deadline_exceeded", str(error), reservation.retry_after()) from None


def _engine_requests(
    request: RequestContext,
    generation: Generation,
    prompts: Sequence[Prompt],
    grammar: Grammar | None,
    prompt_field: str,
) -> list[Request]:
    """The engine's requests, to the LoRA adapter that the request names as its model, if it names one."""
    server = request.server
    requests = engine_requests(
        request.response_id,
        request.arrived_at,
        generation,
        prompts,
        tokenizer=server.tokenizer,
        info=server.engine.info,
        default_max_tokens=server.defaults.max_tokens,
        grammar=grammar,
        watermark=server.watermarks(generation.watermark),
        principal=request.principal,
        priority=request.priority,
        external_id=request.exchange.request_id,
        prompt_field=prompt_field,
    )
    if not (adapter := server.adapter_of(generation.model)):
        return requests
    server.metrics.adapter_requests[adapter] += 1
    return [replace(one, adapter=adapter) for one in requests]


async def _deliver(request: RequestContext, requests: Sequence[Request], response: Response) -> None:
    """Run the answers to their end and send them; their tokens count, sent or not."""
    transcript = request.transcript

    async def emit_and_keep(delta: OutputDelta) -> None:
        assert transcript is not None
        calls = "".join(call.name + call.arguments for call in delta.calls)
        transcript.keep_answer(delta.answer, delta.reasoning + calls + delta.text)
        await response.add(delta)

    await answer_all(request, requests, response.add if transcript is None else emit_and_keep)
    request.settle_rate(200)  # before the client has its answer, after which it may send the next request
    await response.finish(request.prompt_tokens)
    request.end("success", 200)
