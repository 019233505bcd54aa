"""Logits -> token ids, each row by its own parameters and its own randomness. Called by ``model_runner``."""

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.step import TokenLogprobs
from quire_server.layers.sampling import gumbel_sample, token_logprobs, topk_topp_threshold
from quire_server.runner.rows import Rows

_GREEDY_BELOW = 1e-5  # a smaller temperature would overflow and picks the likeliest token anyhow


def sample(
    logits: Tensor,
    rows: Rows,
    row_ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    eos_ids: Collection[int],
) -> tuple[list[int], dict[int, str]]:
    """(token id per entry, failures by row id). logits f32 [S, V]; an entry's context is the first
    ``lengths`` tokens of its row; a row has several entries while drafts are checked.
    """
    for index in np.flatnonzero(lengths < rows.min_total[row_ids]):
        if banned := _stop_ids(rows, int(row_ids[index]), eos_ids, logits.shape[1]):
            logits[index, banned] = float("-inf")
    best = logits.max(dim=-1)
    tokens = best.indices
    is_drawn = rows.temperature[row_ids] >= _GREEDY_BELOW
    if is_drawn.any():
        drawn = np.flatnonzero(is_drawn)
        tokens[drawn] = _draw(logits[drawn], rows, row_ids[drawn], lengths[drawn])
    failures = {}
    if not bool(best.values.isfinite().all()):  # NaN is the maximum of any row that has one
        for index in np.flatnonzero(~best.values.isfinite().numpy()):
            failures[int(row_ids[index])] = "The model computed no finite number for the next token."
            tokens[index] = 0
    return tokens.tolist(), failures


def logprobs(
    logits: Tensor, tokens: list[int], rows: Rows, row_ids: NDArray[np.int64]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """By row id, for the rows that asked, an entry for each position; of the model's own distribution."""
    wanted = rows.num_logprobs[row_ids]
    asking = np.flatnonzero(wanted >= 0)
    if not asking.size:
        return {}
    chosen = torch.tensor([tokens[index] for index in asking])
    widest = min(int(wanted.max()), logits.shape[1])
    values, top_values, top_ids = (part.tolist() for part in token_logprobs(logits[asking], chosen, widest))
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    for place, index in enumerate(asking):
        top = zip(top_ids[place][: wanted[index]], top_values[place][: wanted[index]], strict=True)
        row = int(row_ids[index])
        found[row] = (*found.get(row, ()), TokenLogprobs(tokens[index], values[place], tuple(top)))
    return found


def _draw(logits: Tensor, rows: Rows, row_ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tensor:
    temperature = torch.from_numpy(rows.temperature[row_ids])
    top_k = torch.from_numpy(rows.top_k[row_ids]).clamp(max=logits.shape[1])
    top_p = torch.from_numpy(rows.top_p[row_ids])
    threshold = None
    if bool((top_k > 0).any()) or bool((top_p < 1).any()):
        threshold = topk_topp_threshold(logits / temperature[:, None], top_k, top_p)
    seeds, positions = torch.from_numpy(rows.seed[row_ids]), torch.from_numpy(lengths)
    return gumbel_sample(logits, temperature, seeds, positions, threshold=threshold)


def _stop_ids(rows: Rows, row: int, eos_ids: Collection[int], vocab_size: int) -> list[int]:
    started = rows.started[row]
    assert started is not None
    sampling = started.sampling
    ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
    return sorted(token for token in ids if token < vocab_size)
