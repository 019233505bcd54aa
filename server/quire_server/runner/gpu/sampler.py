"""Sampling on the GPU: greedy and by temperature inside a captured graph; top-k, top-p, min-p, penalties and
grammar masks after it. All other parameters are sampled on the host (``runner.sampler``).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.step import NOT_FINITE, NOTHING_ALLOWED
from quire_server.layers.ops import apply_penalties, draw_tokens
from quire_server.runner.gpu.input_batch import GpuInputBatch
from quire_server.runner.input_batch import PENALTY_COLUMNS, InputBatch
from quire_server.runner.sampler import GREEDY_BELOW

#: In place of a token id: why there is none.
_IS_NAN, _ALL_FORBIDDEN = -1, -2
_WHY = {_IS_NAN: NOT_FINITE, _ALL_FORBIDDEN: NOTHING_ALLOWED}


def can_choose(input_batch: InputBatch, row_ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> bool:
    """Whether ``choose`` supports all sampling parameters of these rows at these context lengths."""
    more = input_batch.edits[row_ids] | (input_batch.num_logprobs[row_ids] >= 0)
    return not (more | (lengths < input_batch.min_total[row_ids])).any()


def wants_more(input_batch: InputBatch, row_ids: NDArray[np.int64]) -> bool:
    """Whether these rows need more than what a graph samples."""
    more = input_batch.penalises[row_ids] | input_batch.has_grammar[row_ids]
    return bool(more.any()) or wants_cuts(input_batch, row_ids)


def wants_cuts(input_batch: InputBatch, row_ids: NDArray[np.int64]) -> bool:
    """Whether any of these rows uses top-k, top-p or min-p."""
    top_k, top_p, min_p = (input_batch.sampling[name][row_ids] for name in ("top_k", "top_p", "min_p"))
    return bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any())


def penalise(
    logits: Tensor,
    state: GpuInputBatch,
    input_batch: InputBatch,
    row_ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    upload: Callable[[NDArray[Any]], Tensor],
) -> None:
    """Apply penalties to the logits f32 [S, V] of rows that have them. Uses the GPU's copy of the newest
    tokens, which the host may not know yet.
    """
    places = np.flatnonzero(input_batch.penalises[row_ids])
    if not places.size:
        return
    ids, ends = row_ids[places], lengths[places]
    index = upload(np.stack((places, ids, np.arange(len(ids)), input_batch.num_prompt[ids], ends)))
    on_device, row_index, order, num_prompt, num_tokens = index
    contexts = state.contexts(upload(input_batch.tokens[ids, : ends.max()]), row_index)
    parameters = (upload(input_batch.sampling[name][ids]) for name in PENALTY_COLUMNS)
    some = logits[on_device]
    logits[on_device] = apply_penalties(some, contexts, order, num_prompt, num_tokens, *parameters, out=some)


def choose(logits: Tensor, state: GpuInputBatch, rows: Tensor, lengths: Tensor, *, cuts: bool) -> Tensor:
    """Tokens i64 [S] from logits f32 [S, V] at positions ``lengths`` of ``rows``, both i64 [S]; also stored
    as the newest tokens of their rows. ``cuts``: some row uses top-k, top-p or min-p.
    """
    sampling = state.sampling
    temperature = sampling["temperature"][rows]
    is_drawn = temperature >= GREEDY_BELOW
    drawn = draw_tokens(
        logits,
        temperature.masked_fill(~is_drawn, 1.0),
        state.seed[rows],
        lengths,
        top=(sampling["top_k"][rows], sampling["top_p"][rows]) if cuts else None,
        min_p=sampling["min_p"][rows] if cuts else None,
    )
    best = logits.amax(dim=-1)  # NaN is the maximum of a row that contains NaN
    return _stored(torch.where(is_drawn, drawn, logits.argmax(dim=-1)), best, state, rows)


def likeliest(largest: Tensor, state: GpuInputBatch, rows: Tensor) -> Tensor:
    """As ``choose`` for greedy rows, from the largest logit of each position and its token, f32 [S, 2]."""
    best, tokens = largest.unbind(1)
    return _stored(tokens.long(), best, state, rows)


def _stored(tokens: Tensor, best: Tensor, state: GpuInputBatch, rows: Tensor) -> Tensor:
    """``tokens``, or why there is none by the largest logits ``best``."""
    tokens = tokens.masked_fill(~best.isfinite(), _IS_NAN)
    tokens = tokens.masked_fill(best == float("-inf"), _ALL_FORBIDDEN)
    state.newest[rows] = tokens.clamp(min=0)
    return tokens


def read(chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[int, str]]:
    """(token ids, failures by position) of the result of ``choose``."""
    failures = {int(index): _WHY[int(chosen[index])] for index in np.flatnonzero(chosen < 0)}
    return np.maximum(chosen, 0), failures
