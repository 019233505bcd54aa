"""Tokens chosen where the logits are: within a captured graph for the likeliest token and the temperature
alone, after it for top-k, top-p, min-p, penalties and what a grammar allows. Called by ``device_steps``;
whatever else a request may ask for is ``sampler``'s business, on the host.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.step import NOTHING_ALLOWED
from quire_server.layers.sampling import apply_penalties
from quire_server.runner.device_rows import DeviceRows
from quire_server.runner.rows import Rows
from quire_server.runner.sampler import GREEDY_BELOW, NOT_FINITE, draw

#: In place of a token.
_NO_NUMBER, _ALL_FORBIDDEN = -1, -2
_WHY = {_NO_NUMBER: NOT_FINITE, _ALL_FORBIDDEN: NOTHING_ALLOWED}


def can_choose(rows: Rows, row_ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> bool:
    """Whether these rows, with so many tokens each, want nothing else than ``choose`` does."""
    more = rows.edits[row_ids] | (rows.num_logprobs[row_ids] >= 0)
    return not (more | (lengths < rows.min_total[row_ids])).any()


def wants_more(rows: Rows, row_ids: NDArray[np.int64]) -> bool:
    """Whether what a graph chose is not what these rows asked for."""
    more = rows.penalises[row_ids] | rows.has_grammar[row_ids]
    return bool(more.any()) or wants_cuts(rows, row_ids)


def wants_cuts(rows: Rows, row_ids: NDArray[np.int64]) -> bool:
    """Whether the noise is not enough for these rows: some tokens are cut off first."""
    cuts = (rows.top_k[row_ids] > 0) | (rows.top_p[row_ids] < 1) | (rows.min_p[row_ids] > 0)
    return bool(cuts.any())


def penalise(
    logits: Tensor,
    state: DeviceRows,
    rows: Rows,
    row_ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    upload: Callable[[NDArray[Any]], Tensor],
) -> None:
    """Change those of logits f32 [S, V] whose rows ask for it, by their contexts, whose newest tokens the
    device may be the only one to know.
    """
    places = np.flatnonzero(rows.penalises[row_ids])
    if not places.size:
        return
    ids, ends = row_ids[places], lengths[places]
    index = upload(np.stack((places, ids, np.arange(len(ids)), rows.num_prompt[ids], ends)))
    on_device, row_index, order, num_prompt, num_tokens = index
    contexts = state.contexts(upload(rows.tokens[ids, : ends.max()]), row_index)
    parameters = (upload(each[ids]) for each in (rows.repetition, rows.presence, rows.frequency))
    some = logits[on_device]
    logits[on_device] = apply_penalties(some, contexts, order, num_prompt, num_tokens, *parameters, out=some)


def choose(logits: Tensor, state: DeviceRows, rows: Tensor, lengths: Tensor, *, cuts: bool) -> Tensor:
    """Tokens i64 [S] of logits f32 [S, V], at positions ``lengths`` of ``rows``, both i64 [S]; left in
    ``state`` as the newest of their rows. ``cuts``: some row wants top-k, top-p or min-p.
    """
    temperature = state.temperature[rows]
    is_drawn = temperature >= GREEDY_BELOW
    drawn = draw(
        logits,
        temperature.masked_fill(~is_drawn, 1.0),
        state.seed[rows],
        lengths,
        top=(state.top_k[rows], state.top_p[rows]) if cuts else None,
        min_p=state.min_p[rows] if cuts else None,
    )
    best = logits.amax(dim=-1)  # what is not a number is the maximum of any row that has one
    tokens = torch.where(is_drawn, drawn, logits.argmax(dim=-1))
    tokens = tokens.masked_fill(~best.isfinite(), _NO_NUMBER)
    tokens = tokens.masked_fill(best == float("-inf"), _ALL_FORBIDDEN)
    state.newest[rows] = tokens.clamp(min=0)
    return tokens


def read(chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[int, str]]:
    """(token ids, failures by position) of what ``choose`` gave."""
    failures = {int(index): _WHY[int(chosen[index])] for index in np.flatnonzero(chosen < 0)}
    return np.maximum(chosen, 0), failures
