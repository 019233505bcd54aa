"""Sampling on the GPU: by temperature, top-k, top-p and min-p inside a captured graph; logits processors,
grammar masks and log-probabilities after it. The logits stay on the GPU.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.step import NOT_FINITE, NOTHING_ALLOWED, TokenLogprobs
from quire_server.layers.ops import apply_penalties, draw_tokens, token_logprobs
from quire_server.runner.gpu.device import upload_together
from quire_server.runner.gpu.input_batch import GpuInputBatch
from quire_server.runner.input_batch import PENALTY_COLUMNS, SAMPLING_COLUMNS, InputBatch
from quire_server.runner.sampler import GREEDY_BELOW, listed

#: In place of a token id: why there is none.
_IS_NAN, _ALL_FORBIDDEN = -1, -2
_WHY = {_IS_NAN: NOT_FINITE, _ALL_FORBIDDEN: NOTHING_ALLOWED}


class Sampled(NamedTuple):
    """What a step sampled, on the host."""

    tokens: NDArray[np.int64]  # a negative number is a failure
    logprobs: dict[int, TokenLogprobs]  # by position, where requested


def wants_more(input_batch: InputBatch, row_ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> bool:
    """Whether these rows need more than what a graph samples at these context lengths."""
    more = input_batch.adjusts[row_ids] | input_batch.has_grammar[row_ids]
    return bool((more | (lengths < input_batch.min_total[row_ids])).any())


def penalise(
    logits: Tensor,
    state: GpuInputBatch,
    input_batch: InputBatch,
    row_ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    upload: Callable[[NDArray[Any]], Tensor],
) -> None:
    """Apply penalties to the logits f32 [S, V] of rows that have them. Counts the tokens of the GPU's copy of
    their contexts, which has the newest ones, too.
    """
    places = np.flatnonzero(input_batch.penalises[row_ids])
    if not places.size:
        return
    ids, ends = row_ids[places], lengths[places]
    contexts = state.contexts(ids, ends)
    index = (places, ids, input_batch.num_prompt[ids], ends)
    on_device, rows, num_prompt, num_tokens = upload_together(upload, *index)
    parameters = (upload(input_batch.sampling[name][ids]) for name in PENALTY_COLUMNS)
    some = logits[on_device]
    logits[on_device] = apply_penalties(some, contexts, rows, num_prompt, num_tokens, *parameters, out=some)


def choose(logits: Tensor, state: GpuInputBatch, rows: Tensor, lengths: Tensor) -> Tensor:
    """Tokens i64 [S] from logits f32 [S, V] at positions ``lengths`` of ``rows``, both i64 [S], by
    temperature, top-k, top-p and min-p; also stored as the newest tokens of their rows.
    """
    temperature, top_k, top_p, min_p = (state.sampling[name][rows] for name in SAMPLING_COLUMNS)
    tokens = draw_tokens(
        logits,
        temperature.masked_fill(temperature < GREEDY_BELOW, 0.0),
        state.seed[rows],
        lengths,
        top=(top_k, top_p),
        min_p=min_p,
    )
    best = logits.amax(dim=-1)  # NaN is the maximum of a row that contains NaN
    return _stored(tokens, best, state, rows)


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


def logprobs_of(
    raw: Tensor,
    tokens: Tensor,
    asking: NDArray[np.int64],
    wanted: NDArray[np.int64],
    download: Callable[[Tensor], Callable[[], NDArray[Any]]],
) -> Callable[[], dict[int, TokenLogprobs]]:
    """As ``sampler.logprobs``, from the logits ``raw`` f32 [A, V] and sampled ``tokens`` i64 [A] of the
    positions ``asking``, with the ``wanted`` i64 [A] likeliest ones. The function waits for them.
    """
    widest = min(int(wanted.max()), raw.shape[1])
    tokens = tokens.clamp(min=0)
    values, top_values, top_ids = token_logprobs(raw, tokens, widest)
    waits = [download(part) for part in (tokens, values, top_values, top_ids)]

    def wait() -> dict[int, TokenLogprobs]:
        return listed(asking, wanted, *(wait() for wait in waits))

    return wait


def read(chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[int, str]]:
    """(token ids, failures by position) of the result of ``choose``."""
    failures = {int(index): _WHY[int(chosen[index])] for index in np.flatnonzero(chosen < 0)}
    return np.maximum(chosen, 0), failures
