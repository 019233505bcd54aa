"""Repetition, presence and frequency penalties.

No state is kept between steps: every call counts the tokens of its rows' contexts, so draft tokens,
rejections and preemptions need no bookkeeping.
"""

import torch
from torch import Tensor

if torch.cuda.is_available():
    from quire_kernels.sampling.apply_penalties_triton import apply_penalties_triton


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
    """Logits f32 [B, V] with penalties applied; ``out`` may be ``logits``.

    The context of position i is ``tokens[rows[i], : lengths[i]]``, of which the first ``prompt_lengths[i]``
    are the prompt; tokens i32 or i64 [R, L], the others i64 [B]. For tokens in the context, a positive logit
    is divided by ``repetition`` f32 [B] and any other is multiplied by it (Keskar et al. 2019,
    arXiv:1909.05858). From tokens that occur n > 0 times after the prompt, presence + n * frequency is then
    subtracted, both f64 [B], their sum rounded once. 1, 0 and 0 switch them off. Ids outside of the
    vocabulary are ignored.
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
    """One position at a time."""
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
    """i64 [V]: occurrences of each token."""
    return torch.bincount(ids[(ids >= 0) & (ids < vocab_size)], minlength=vocab_size)
