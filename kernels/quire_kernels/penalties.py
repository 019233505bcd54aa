"""Repetition, presence and frequency penalties. Called by the sampler for the rows that ask.

Nothing is kept from step to step: every call counts what its rows' contexts hold, so that drafts, rejections
and preemptions need no bookkeeping.
"""

import torch
from torch import Tensor

if torch.cuda.is_available():
    from quire_kernels.penalties_triton import apply_penalties_triton


def apply_penalties(
    logits: Tensor,
    tokens: Tensor,
    rows: Tensor,
    prompt_lengths: Tensor,
    lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """logits f32 [B, V], penalised; ``out`` may be ``logits``.

    The context of position i is ``tokens[rows[i], : lengths[i]]``, the first ``prompt_lengths[i]`` of it the
    prompt; tokens i64 [R, L], the others i64 [B]. Of tokens in the context a logit above zero is divided by
    ``repetition`` f32 [B], another is multiplied (Keskar et al. 2019, arXiv:1909.05858); of tokens that come
    n > 0 times after the prompt, presence + n * frequency is then taken, both f64 [B] and their sum rounded
    once. 1, 0 and 0 are off. Ids beyond the vocabulary count for nothing.
    """
    given = (tokens, rows, prompt_lengths, lengths, repetition, presence, frequency)
    if logits.is_cuda:
        return apply_penalties_triton(logits, *given, out=out)
    return apply_penalties_reference(logits, *given, out=out)


def apply_penalties_reference(
    logits: Tensor,
    tokens: Tensor,
    rows: Tensor,
    prompt_lengths: Tensor,
    lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """One position after the other."""
    out = torch.empty_like(logits) if out is None else out
    vocab_size = logits.shape[1]
    places = zip(rows.tolist(), prompt_lengths.tolist(), lengths.tolist(), strict=True)
    for index, (row, prompt_length, length) in enumerate(places):
        prompt = _counts(tokens[row, :prompt_length], vocab_size)
        answer = _counts(tokens[row, prompt_length:length], vocab_size)
        x, factor = logits[index], repetition[index]
        x = torch.where(prompt + answer > 0, torch.where(x > 0, x / factor, x * factor), x)
        taken = (presence[index] + frequency[index] * answer).float()
        out[index] = torch.where(answer > 0, x - taken, x)
    return out


def _counts(ids: Tensor, vocab_size: int) -> Tensor:
    """i64 [V]: how often each token comes."""
    return torch.bincount(ids[(ids >= 0) & (ids < vocab_size)], minlength=vocab_size)
