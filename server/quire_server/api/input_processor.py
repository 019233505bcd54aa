"""From a parsed call and its prompts' tokens to the engine's requests: one for each answer.

What depends on the prompt and the tokenizer is decided here: how long an answer may be, the seeds of several
answers, the token ids of bad words. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire_http.errors import bad_field
from quire_server.api.auth import Principal
from quire_server.api.protocol.generation import Generation
from quire_server.core.request import Request
from quire_server.core.sampling_params import INT64_MAX, Grammar, SamplingParams
from quire_server.engine.messages import EngineInfo
from quire_server.errors import PromptTooLongError
from quire_server.text.tokenizer import Tokenizer

# Log-probabilities are kept until the answer is sent, of prompts and of answers: about 100 bytes each.
MAX_NUMBERS = 1 << 18

Prompt = tuple[int, ...]


def engine_requests(
    name: str,
    arrived_at: float,
    generation: Generation,
    prompts: Sequence[Prompt],
    *,
    tokenizer: Tokenizer,
    info: EngineInfo,
    default_max_tokens: int | None,
    watermark: bool,
    principal: Principal,
    priority: int,
    grammar: Grammar | None,
    external_id: str = "",
    prompt_field: str = "prompt",
) -> list[Request]:
    """n for each prompt, each n-th with a seed of its own. `external_id`: of the HTTP request, for the log;
    `prompt_field`: the request's field that prompts come from, for errors.
    """
    asked = replace(
        generation.sampling,
        bad_words=bad_word_ids(generation.bad_words, tokenizer),
        watermark=watermark,
        grammar=grammar,
    )
    _check_choice(asked, tokenizer.eos_token_ids, info.vocab_size)
    _check_room(generation.n, [len(prompt) for prompt in prompts], info, prompt_field)
    _check_prompt_logprobs(generation, prompts)
    _check_resume(generation, prompts)
    requests: list[Request] = []
    context = min(info.max_model_len, info.kv_capacity)  # tokens of prompt and answer
    logprobs_limit = _logprobs_limit(generation, len(prompts))
    for prompt in prompts:
        max_tokens = _max_tokens(
            generation, len(prompt), context, default_max_tokens, logprobs_limit, prompt_field
        )
        if asked.min_tokens > max_tokens:
            raise bad_field("min_tokens", f"is more than the {max_tokens} tokens that the answer may have")
        if generation.resume is not None and len(generation.resume.token_ids) > max_tokens:
            raise bad_field(
                "resume.token_ids", f"are more than the {max_tokens} tokens that the answer may have"
            )
        for number in range(generation.n):
            seed = None if asked.seed is None else (asked.seed + number) % (INT64_MAX + 1)
            requests.append(
                Request(
                    f"{name}-{len(requests)}",
                    prompt,
                    replace(asked, max_tokens=max_tokens, seed=seed),
                    arrival=arrived_at,
                    priority=priority,
                    cache_salt=principal.cache_salt(generation.cache_salt),
                    cache_ttl=generation.cache_ttl,
                    client=principal.client,
                    external_id=external_id,
                    output_token_ids=() if generation.resume is None else generation.resume.token_ids,
                )
            )
    return requests


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """The tokens of each word at the beginning of a text, and after a space."""
    found: dict[Prompt, None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise bad_field("bad_words", "must hold more than white space")
        for text in (bare, " " + bare):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(ids for ids in found if ids)


def _check_resume(generation: Generation, prompts: Sequence[Prompt]) -> None:
    if generation.resume is not None and len(prompts) > 1:
        raise bad_field("resume", "needs one prompt")


def _check_choice(asked: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises where no token can be an answer's first. Where none can be a later one, or one that the grammar
    allows, the engine finds out.
    """
    banned = {word[0] for word in asked.bad_words if len(word) == 1}
    ends = {*asked.stop_token_ids, *(() if asked.ignore_eos else eos_token_ids)}
    if not asked.min_tokens or asked.grammar is not None:  # a grammar may end before min_tokens
        ends = set()
    if not _leaves(banned, asked.allowed_token_ids, vocab_size):
        raise bad_field("bad_words", "excludes every token that is allowed; ban fewer, or allow others")
    if not _leaves(banned | ends, asked.allowed_token_ids, vocab_size):
        raise bad_field(
            "min_tokens",
            "every token that is allowed would end the answer, which min_tokens forbids; allow others, or "
            "leave min_tokens out",
        )


def _leaves(excluded: set[int], allowed: Sequence[int], vocab_size: int) -> bool:
    """Whether there is another token."""
    if allowed:
        return not excluded.issuperset(allowed)
    return len(excluded) < vocab_size or not excluded.issuperset(range(vocab_size))


def _check_prompt_logprobs(generation: Generation, prompts: Sequence[Prompt]) -> None:
    wanted = generation.sampling.prompt_logprobs
    if wanted is not None and (numbers := sum(map(len, prompts)) * (wanted + 1)) > MAX_NUMBERS:
        raise bad_field(
            "prompt_logprobs",
            f"would be {numbers} numbers, which is more than {MAX_NUMBERS}; send shorter prompts, or "
            "ask for fewer of each token",
        )


def _logprobs_limit(generation: Generation, num_prompts: int) -> int | None:
    """The most tokens of an answer whose log-probabilities are kept; None where none are asked for."""
    wanted = generation.sampling.logprobs
    return None if wanted is None else MAX_NUMBERS // (num_prompts * generation.n * (wanted + 1))


def _max_tokens(
    generation: Generation,
    prompt_length: int,
    context: int,
    default: int | None,
    logprobs_limit: int | None,
    prompt_field: str,
) -> int:
    """What the context leaves for the answer. At least 1: the engine samples a token even where none is asked
    for, and it is dropped. Raises where the request can never fit, or asks for the log-probabilities of more
    than ``logprobs_limit`` tokens.
    """
    if prompt_length == 0:
        raise bad_field(prompt_field, "is empty")
    room = context - prompt_length
    if room < 1:
        raise PromptTooLongError(
            f"The prompt has {prompt_length} tokens and the context is {context} tokens: shorten the prompt.",
            param=prompt_field,
        )
    if generation.max_tokens is None:
        return min(room, default or room, logprobs_limit or room)
    if generation.max_tokens > room:
        raise bad_field(
            "max_tokens",
            f"{generation.max_tokens} with a prompt of {prompt_length} tokens is more than the context of "
            f"{context} tokens; ask for at most {room}",
            code="context_length_exceeded",
        )
    if logprobs_limit is not None and generation.max_tokens > logprobs_limit:
        raise bad_field(
            "logprobs",
            f"would be more than {MAX_NUMBERS} numbers; ask for at most {logprobs_limit} tokens, for fewer "
            "answers, or for fewer of each token",
        )
    return max(1, generation.max_tokens)


def _check_room(n: int, prompt_lengths: Sequence[int], info: EngineInfo, prompt_field: str) -> None:
    """Raises where the prompts of all answers are more than the whole KV cache: no waiting changes that. One
    prompt alone is checked by `_max_tokens`.
    """
    once = sum(prompt_lengths)
    each = once - sum(map(info.num_shared_tokens, prompt_lengths))
    needed = once + (n - 1) * each
    if n * len(prompt_lengths) == 1 or needed <= info.kv_capacity:
        return
    most = 1 + (info.kv_capacity - once) // each if once <= info.kv_capacity else 0
    raise bad_field(
        "n" if most else prompt_field,
        f"{n} answers to {once} prompt tokens take {needed} tokens of KV cache, before any of "
        f"max_tokens, and the whole cache holds {info.kv_capacity}; shorten the prompt, or "
        + (f"ask for at most n={most}" if most else "send fewer prompts in one request"),
        code="context_length_exceeded",
    )
