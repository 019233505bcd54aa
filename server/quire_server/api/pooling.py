"""/v1/embeddings, /pooling, /v1/rerank and /v1/score: admit, read, tokenise, have the engine pool, deliver.

A request counts once in admission, however many inputs it has: of these as many are in the engine at a time
as fit into a batch. A cross-encoder scores pairs of texts; an embedder scores them by the cosine of their
vectors.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import math
import operator
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from quire_http.errors import bad_field, overloaded
from quire_http.exchange import HttpExchange, to_json
from quire_server.api.admission import AdmissionRequest, AnswerLimits
from quire_server.api.context import ServerContext
from quire_server.api.protocol.embeddings import (
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    check_pairs,
    estimated_tokens,
)
from quire_server.api.protocol.requests import MAX_TEXT_TOKENS, Prompts
from quire_server.api.protocol.validation import validate
from quire_server.api.request_context import RequestContext, account
from quire_server.core.request import FinishReason, PoolingParams, Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import TokenEvent
from quire_server.engine.client import DeadlineExceededError
from quire_server.errors import PromptTooLongError

_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
Call = TypeVar("Call", EmbeddingRequest, RerankRequest, ScoreRequest)
Answer = Callable[[RequestContext, Call], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Input:
    """What the engine pools into one vector."""

    token_ids: tuple[int, ...]
    asked: PoolingParams = PoolingParams()


async def embeddings(server: ServerContext, exchange: HttpExchange) -> None:
    """The handler of /v1/embeddings."""
    request = RequestContext(server, exchange)
    await account(
        request, _serve(request, EmbeddingRequest, functools.partial(_answer_vectors, is_openai=True))
    )


async def pooling(server: ServerContext, exchange: HttpExchange) -> None:
    """The handler of /pooling."""
    request = RequestContext(server, exchange)
    await account(
        request, _serve(request, EmbeddingRequest, functools.partial(_answer_vectors, is_openai=False))
    )


async def rerank(server: ServerContext, exchange: HttpExchange) -> None:
    """The handler of /v1/rerank."""
    request = RequestContext(server, exchange)
    await account(request, _serve(request, RerankRequest, _answer_rerank))


async def score(server: ServerContext, exchange: HttpExchange) -> None:
    """The handler of /v1/score."""
    request = RequestContext(server, exchange)
    await account(request, _serve(request, ScoreRequest, _answer_score))


async def _serve(request: RequestContext, model: type[Call], answer: Answer[Call]) -> None:
    try:
        answering = answer(request, await _admit(request, model))
        await request.exchange.run(answering, request.server.drain.cut)
    except DeadlineExceededError as error:
        raise overloaded("deadline_exceeded", str(error), request.reservation.retry_after()) from None
    finally:
        request.reservation.release()


async def _admit(request: RequestContext, model: type[Call]) -> Call:
    """Admit a request, read and parse its body, and take its share of the queue. Raises ApiError."""
    server, client = request.server, request.client
    server.rates.check(client)
    info = server.engine.info
    request.reservation = server.admission.reserve(client, info, server.engine.stats)
    call = await server.read(
        request.exchange, lambda body: validate(model, body, info.vocab_size), info.kv_capacity
    )
    if request.transcript is not None:
        request.transcript.keep_prompts(call.texts)
    server.check_model(call.model, request.principal)
    request.priority = server.priority(request.principal, 0)
    request.span.describe(f"{request.operation} {call.model}", {"gen_ai.request.model": call.model})
    estimate = estimated_tokens(call, info.max_model_len, are_paired=info.pooling == "score")
    asked = AdmissionRequest(client, 1, estimate, request.priority, 1)
    server.rates.charge(client, asked.prompt_tokens)
    request.charged_tokens = asked.prompt_tokens
    request.reservation.claim(asked, server.engine.info, server.engine.stats)
    request.exchange.headers += server.rates.headers(client)
    return call


# ---------------------------------------------------------------- answers


async def _answer_vectors(request: RequestContext, call: EmbeddingRequest, *, is_openai: bool) -> None:
    info = request.server.engine.info
    if info.pooling != "embed":
        raise bad_field("model", "is a cross-encoder, which has no vectors: ask /v1/score or /v1/rerank")
    if call.dimensions is not None and call.dimensions > info.embedding_size:
        raise bad_field(
            "dimensions", f"{call.dimensions} are more than the {info.embedding_size} of the model's vectors"
        )
    asked = PoolingParams(dimensions=call.dimensions or 0)
    tokens = await _tokenize(request, call.input, call.truncate_prompt_tokens, "input")
    vectors = await _pool(request, [Input(one, asked) for one in tokens])
    head: dict[str, Any] = {"object": "list", "model": call.model}
    if not is_openai:
        head = {"id": f"pool-{request.response_id}", "created": int(time.time()), **head}
    kind, name = ("embedding", "embedding") if is_openai else ("pooling", "data")
    as_base64 = call.encoding_format == "base64"
    await _deliver(
        request, head, functools.partial(_item, kind=kind, name=name, as_base64=as_base64), vectors
    )


async def _answer_rerank(request: RequestContext, call: RerankRequest) -> None:
    if not call.documents:
        raise bad_field("documents", "is empty")
    scores = await _scores(request, call, ("query", "documents"))
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: call.top_n or None]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": call.documents[index]}} if call.return_documents else {})
        for index in best
    ]
    usage = {"prompt_tokens": request.prompt_tokens, "total_tokens": request.prompt_tokens}
    body = {
        "id": f"rerank-{request.response_id}",
        "model": call.model,
        "results": results,
        "usage": usage,
    }
    request.settle_rate(200)
    await request.exchange.json(body)
    request.end("success", 200)


async def _answer_score(request: RequestContext, call: ScoreRequest) -> None:
    if not call.text_2:
        raise bad_field("text_2", "is empty")
    scores = await _scores(request, call, ("text_1", "text_2"))
    data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
    usage = {"prompt_tokens": request.prompt_tokens, "total_tokens": request.prompt_tokens}
    body = {
        "id": f"score-{request.response_id}",
        "object": "list",
        "created": int(time.time()),
        "model": call.model,
        "data": data,
        "usage": usage,
    }
    request.settle_rate(200)
    await request.exchange.json(body)
    request.end("success", 200)


async def _scores(
    request: RequestContext, call: RerankRequest | ScoreRequest, fields: tuple[str, str]
) -> list[float]:
    """One score of each pair, by the model itself or by the cosine of two vectors. A text that several pairs
    have is tokenised, and embedded, once.
    """
    pairs, truncate, info = call.pairs, call.truncate_prompt_tokens, request.server.engine.info
    firsts = list(dict.fromkeys(first for first, _ in pairs))
    seconds = list(dict.fromkeys(second for _, second in pairs))
    if info.pooling == "score":
        _check_truncation(request, truncate)
        parts = [
            dict(zip(texts, await _tokenize_parts(request, texts, field), strict=True))
            for texts, field in ((firsts, fields[0]), (seconds, fields[1]))
        ]
        lengths = (len(parts[0][one]) + len(parts[1][other]) for one, other in pairs)
        check_pairs(lengths, info.max_model_len, call)
        inputs = [_pair(request, parts[0][one], parts[1][other], truncate) for one, other in pairs]
        return [_numbers(vector)[0] for vector in await _pool(request, inputs)]
    tokens = [
        *await _tokenize(request, firsts, truncate, fields[0]),
        *await _tokenize(request, seconds, truncate, fields[1]),
    ]
    vectors = [_numbers(vector) for vector in await _pool(request, [Input(one) for one in tokens])]
    of_first = dict(zip(firsts, vectors, strict=False))
    of_second = dict(zip(seconds, vectors[len(firsts) :], strict=True))
    return [_cosine(of_first[one], of_second[other]) for one, other in pairs]


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.sqrt(_product(one, one) * _product(other, other))
    return _product(one, other) / lengths if lengths else 0.0


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return float(sum(map(operator.mul, one, other)))


def _numbers(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)


# ---------------------------------------------------------------- inputs


async def _tokenize(
    request: RequestContext,
    texts: Prompts | Sequence[str],
    truncate: int | None,
    field: str,
) -> list[tuple[int, ...]]:
    """Token ids of each text, none longer than the model's longest. Raises ApiError."""
    server, longest = request.server, request.server.engine.info.max_model_len
    _check_truncation(request, truncate)
    most = longest if truncate is None or truncate < 0 else truncate
    limit = longest if truncate is None else max(MAX_TEXT_TOKENS, longest)
    found = []
    is_short = sum(map(len, texts)) <= 2000
    for text in texts:
        tokens = text
        if isinstance(text, str):
            tokens = await server.tokenize(
                text, special=True, limit=limit, client=request.client, param=field, on_the_spot=is_short
            )
        assert not isinstance(tokens, str)
        if truncate is not None and len(tokens) > most:
            ends = tokens[-1:] if isinstance(text, str) and server.tokenizer.ends_texts else ()
            tokens = (*tokens[: most - len(ends)], *ends)
        _check_length(len(tokens), longest, field)
        if not tokens:
            raise bad_field(field, "has an input without tokens")
        found.append(tuple(tokens))
    return found


async def _tokenize_parts(request: RequestContext, texts: Sequence[str], field: str) -> list[tuple[int, ...]]:
    """Token ids of each text of pairs, without special tokens; how long a pair is decides what is kept."""
    server = request.server
    limit = max(MAX_TEXT_TOKENS, server.engine.info.max_model_len)
    is_short = sum(map(len, texts)) <= 2000
    return [
        tuple(
            await server.tokenize(
                text, special=False, limit=limit, client=request.client, param=field, on_the_spot=is_short
            )
        )
        for text in texts
    ]


def _check_truncation(request: RequestContext, truncate: int | None) -> None:
    longest = request.server.engine.info.max_model_len
    if truncate is not None and truncate != -1 and not 1 <= truncate <= longest:
        raise bad_field("truncate_prompt_tokens", f"must be -1, or between 1 and {longest}")


def _check_length(length: int, longest: int, field: str) -> None:
    if length > longest:
        raise PromptTooLongError(
            f"An input has {length} tokens, and the model takes {longest}: shorten it, or send "
            "truncate_prompt_tokens: -1.",
            param=field,
        )


def _pair(
    request: RequestContext, first: tuple[int, ...], second: tuple[int, ...], truncate: int | None
) -> Input:
    """Both texts with the special tokens of a pair. Where a pair is to be truncated, its second text is."""
    longest = request.server.engine.info.max_model_len
    layout = request.server.tokenizer.pair_layout
    if truncate is not None:
        most = longest if truncate < 0 else truncate
        second = second[: max(0, most - len(first) - layout.num_special)]
    tokens, second_text_at = layout.join(first, second)
    _check_length(len(tokens), longest, "input")
    return Input(tokens, PoolingParams(second_text_at=second_text_at))


# ---------------------------------------------------------------- engine


async def _pool(request: RequestContext, inputs: Sequence[Input]) -> list[bytes]:
    """The vector of each input; the first failure ends them all."""
    server, info = request.server, request.server.engine.info
    request.exchange.release_body()
    server.metrics.asked(1, 1)
    limits = [AnswerLimits(len(one.token_ids), 1) for one in inputs]
    request.reservation.set_answers(limits, server.engine.stats)
    request.prompt_tokens = sum(one.prompt_tokens for one in limits)
    server.metrics.prompt_taken(request.prompt_tokens)
    room = asyncio.Semaphore(info.max_num_seqs)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_pool_one(request, index, one, room)) for index, one in enumerate(inputs)
            ]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _pool_one(request: RequestContext, index: int, one: Input, room: asyncio.Semaphore) -> bytes:
    server, reservation = request.server, request.reservation

    def came(_: int, at: float) -> None:
        reservation.begin(index)
        server.metrics.first_token(at - request.arrived_at, request.span.exemplar)

    received = functools.partial(reservation.received, index)
    async with room:
        # Inputs that have waited for room here arrive now: other requests take their turn among them.
        is_first = index < server.engine.info.max_num_seqs
        engine_request = Request(
            f"{request.operation}-{request.response_id}-{index}",
            one.token_ids,
            _SAMPLING,
            arrival=request.arrived_at if is_first else time.monotonic(),
            priority=request.priority,
            client=request.client,
            external_id=request.exchange.request_id,
            pooling=one.asked,
        )
        async with server.engine.submit(
            engine_request, request.deadline, came, is_whole=True, on_received=received
        ) as events:
            event = await events.next()
    _measure(request, index, one, event)
    return event.pooled


def _measure(request: RequestContext, index: int, one: Input, event: TokenEvent) -> None:
    metrics = request.server.metrics
    metrics.choice_finished(FinishReason.STOP)
    if event.timing is not None:
        request.span.answered(index, event.timing)
        if metrics.answers is not None:
            metrics.answers.finished(len(one.token_ids), 1, event.timing, request.span.exemplar)


async def _deliver(
    request: RequestContext,
    head: dict[str, Any],
    item: Callable[[int, bytes], bytes],
    vectors: Sequence[bytes],
) -> None:
    """Send the response in parts of one vector: a thousand of them as text take a second to write."""
    exchange = request.exchange
    request.settle_rate(200)
    usage = {"prompt_tokens": request.prompt_tokens, "total_tokens": request.prompt_tokens}
    await exchange.begin(200, [(b"content-type", b"application/json")])
    await exchange.part(to_json(head)[:-1] + b', "data": [')
    for index, vector in enumerate(vectors):
        await exchange.part((b", " if index else b"") + item(index, vector))
        await asyncio.sleep(0)
    await exchange.end(b'], "usage": ' + to_json(usage) + b"}")
    request.end("success", 200)


def _item(index: int, vector: bytes, *, kind: str, name: str, as_base64: bool) -> bytes:
    """One vector; nine digits are all of a float32."""
    if as_base64:
        value = b'"' + base64.b64encode(vector) + b'"'
    else:
        value = ("[" + ", ".join([f"{number:.9g}" for number in _numbers(vector)]) + "]").encode()
    return f'{{"object": "{kind}", "index": {index}, "{name}": '.encode() + value + b"}"
