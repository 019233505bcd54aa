"""Logits -> token ids, each row by its own parameters and its own randomness. Called by ``model_runner``."""

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.step import NOTHING_ALLOWED, TokenLogprobs
from quire_server.core.watermark import Watermark
from quire_server.layers.sampling import gumbel_sample, token_logprobs, topk_topp_threshold
from quire_server.runner.logits_processors import adjust
from quire_server.runner.rows import Rows

GREEDY_BELOW = 1e-5  # a smaller temperature would overflow and picks the likeliest token anyhow

#: Whatever it was sampled for: the cache cannot be believed any more.
NOT_FINITE = "The model computed no finite number for the next token."


def sample(
    logits: Tensor,
    rows: Rows,
    row_ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    eos_ids: Collection[int],
    watermark: Watermark | None = None,
) -> tuple[NDArray[np.int64], dict[int, str]]:
    """(token ids i64 [S], failures by position). logits f32 [S, V], changed in place.

    The context of position i is ``rows.tokens[row_ids[i], : lengths[i]]``; a row may occur more than once.
    """
    for index in np.flatnonzero(rows.adjusts[row_ids]):
        row, length = row_ids[index], lengths[index]
        started = rows.started[row]
        assert started is not None
        context = rows.tokens[row, :length]
        adjust(logits[index], context, started.num_prompt_tokens, started.sampling, watermark)
    for index in np.flatnonzero(lengths < rows.min_total[row_ids]):
        if banned := _stop_ids(rows, int(row_ids[index]), eos_ids, logits.shape[1]):
            logits[index, banned] = float("-inf")
    values = logits.numpy()
    tokens = values.argmax(axis=-1)  # a tenth of torch's time
    best = values[np.arange(len(tokens)), tokens]  # NaN is the maximum of any row that has one
    is_drawn = rows.temperature[row_ids] >= GREEDY_BELOW
    if is_drawn.any():
        drawn = np.flatnonzero(is_drawn)
        tokens[drawn] = _draw(logits[drawn], rows, row_ids[drawn], lengths[drawn]).numpy()
    failures = {}
    is_sound = np.isfinite(best)
    if not is_sound.all():
        for index in np.flatnonzero(~is_sound):
            failures[int(index)] = NOTHING_ALLOWED if best[index] == float("-inf") else NOT_FINITE
            tokens[index] = 0
    return tokens, failures


def logprobs(
    logits: Tensor, tokens: NDArray[np.int64], wanted: NDArray[np.int64]
) -> dict[int, TokenLogprobs]:
    """By position: of the token there and of the ``wanted`` likeliest ones (i64 [S], -1: nothing), by the
    model's own distribution; logits f32 [S, V].
    """
    asking = np.flatnonzero(wanted >= 0)
    if not asking.size:
        return {}
    widest = min(int(wanted.max()), logits.shape[1])
    chosen = torch.from_numpy(tokens[asking])
    values, top_values, top_ids = (part.tolist() for part in token_logprobs(logits[asking], chosen, widest))
    return {
        int(index): TokenLogprobs(
            int(tokens[index]),
            values[place],
            tuple(zip(top_ids[place][: wanted[index]], top_values[place][: wanted[index]], strict=True)),
        )
        for place, index in enumerate(asking)
    }


def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    top: tuple[Tensor, Tensor] | None,
    min_p: Tensor | None,
) -> Tensor:
    """i64 [S] from logits f32 [S, V] at a ``temperature`` f32 [S] above 0; ``top``: k i64, p f32 of each."""
    threshold = None
    if top is not None:
        top_k, top_p = top
        scaled = logits / temperature[:, None]
        threshold = topk_topp_threshold(scaled, top_k.clamp(max=logits.shape[1]), top_p)
    if min_p is not None:
        # p >= min_p * p_max, in logits; ratios are the same whatever top-k and top-p left.
        floor = logits.amax(dim=-1) / temperature + min_p.log()
        threshold = floor if threshold is None else torch.maximum(threshold, floor)
    return gumbel_sample(logits, temperature, seeds, positions, threshold=threshold)


def _draw(logits: Tensor, rows: Rows, row_ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tensor:
    top_k, top_p, min_p = (
        torch.from_numpy(parameter[row_ids]) for parameter in (rows.top_k, rows.top_p, rows.min_p)
    )
    has_top = bool((top_k > 0).any()) or bool((top_p < 1).any())
    return draw(
        logits,
        torch.from_numpy(rows.temperature[row_ids]),
        torch.from_numpy(rows.seed[row_ids]),
        torch.from_numpy(lengths),
        top=(top_k, top_p) if has_top else None,
        min_p=min_p if bool((min_p > 0).any()) else None,
    )


def _stop_ids(rows: Rows, row: int, eos_ids: Collection[int], vocab_size: int) -> list[int]:
    started = rows.started[row]
    assert started is not None
    sampling = started.sampling
    ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
    return sorted(token for token in ids if token < vocab_size)
