"""Logits processors, applied before the temperature: bias, penalties, allowed and banned tokens, watermark,
the end of a thought.

Each changes the logits of one sampled position in place and depends only on that position's context and the
request's parameters. There is no state between steps, so drafts, rejections and preemptions need no
bookkeeping. docs/sampling.md documents the order.
"""

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.sampling_params import SamplingParams, ThinkingBudget
from quire_server.core.watermark import GOLDEN, MIXERS, Watermark

_NEVER = float("-inf")
_BEGIN_WITHIN = 4  # first tokens of an answer in which a thought begins; white space may come before it


def adjust(
    logits: Tensor,
    context: NDArray[np.int64],
    num_prompt_tokens: int,
    sampling: SamplingParams,
    watermark: Watermark | None,
) -> None:
    """Apply all of them in order. logits f32 [V]; ``context``: the tokens so far, prompt first."""
    answer = context[num_prompt_tokens:]
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        logits[list(ids)] += torch.tensor(biases)
    if sampling.repetition_penalty != 1.0:
        penalise_repetition(logits, context, sampling.repetition_penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and answer.size:
        # By sorting the answer: an array of counts would be as long as the vocabulary.
        seen, counts = np.unique(answer, return_counts=True)
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits.numpy()[seen] -= penalties.astype(np.float32)
    if sampling.allowed_token_ids:
        allowed = list(sampling.allowed_token_ids)
        kept = logits[allowed]
        logits.fill_(_NEVER)[allowed] = kept
    if sampling.bad_words and (banned := completing(answer, sampling.bad_words)):
        logits[banned] = _NEVER
    if sampling.watermark and watermark is not None:
        green = green_list(watermark, int(context[-1]), logits.shape[0])
        logits += torch.from_numpy(green).float().mul_(watermark.delta)
    if sampling.thinking is not None and is_spent(answer, sampling.thinking):
        end = sampling.thinking.end_token_id
        value = float(logits[end])
        if value != _NEVER:  # else a ban or a grammar forbids it, and no token would be left
            logits.fill_(_NEVER)[end] = value


def is_spent(answer: NDArray[np.int64], thinking: ThinkingBudget) -> bool:
    """Whether the answer is a thought that is as long as it may be, and has to end."""
    begin = 0
    if thinking.begin_token_id is not None:
        found = np.flatnonzero(answer[:_BEGIN_WITHIN] == thinking.begin_token_id)
        if not found.size:
            return False
        begin = int(found[0]) + 1
    thought = answer[begin:]
    return len(thought) >= thinking.max_tokens and not (thought == thinking.end_token_id).any()


def penalise_repetition(logits: Tensor, context: NDArray[np.int64], penalty: float) -> None:
    """CTRL's repetition penalty (Keskar et al. 2019, arXiv:1909.05858): tokens of the context become less
    likely, whatever the sign of their logit.
    """
    likely, factor = logits.numpy(), np.float32(penalty)
    values = likely[context]  # a token that occurs twice is written twice with the same value
    likely[context] = np.where(values > 0, values / factor, values * factor)


def completing(answer: NDArray[np.int64], bad_words: Collection[tuple[int, ...]]) -> list[int]:
    """Tokens that would complete one of these sequences at the end of the output."""
    return [
        word[-1]
        for word in bad_words
        if len(word) <= len(answer) + 1 and tuple(answer[len(answer) - len(word) + 1 :]) == word[:-1]
    ]


def green_list(watermark: Watermark, previous: int, vocab_size: int) -> NDArray[np.bool_]:
    """bool [V]: ``watermark.is_green(previous, token)`` for every token."""
    numbers = np.arange(1, vocab_size + 1, dtype=np.uint64)
    numbers *= np.uint64(GOLDEN)  # unsigned arithmetic wraps around
    numbers += np.uint64(watermark.seed(previous))
    numbers ^= numbers >> np.uint64(30)
    numbers *= np.uint64(MIXERS[0])
    numbers ^= numbers >> np.uint64(27)
    numbers *= np.uint64(MIXERS[1])
    numbers ^= numbers >> np.uint64(31)
    return numbers < np.uint64(watermark.limit)
