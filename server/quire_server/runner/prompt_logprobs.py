"""Log-probabilities of prompt tokens, for the rows that ask. Called by ``model_runner`` after the forward
pass.

The logits of a prompt's every position would be gigabytes: they are computed for a few positions at a time,
and only numbers that were asked for are kept.
"""

import numpy as np
from torch import Tensor, from_numpy

from quire_server.core.step import TokenLogprobs
from quire_server.models.decoder import Decoder
from quire_server.runner.batch import Spans
from quire_server.runner.rows import Rows
from quire_server.runner.sampler import logprobs

_WORKSPACE_BYTES = 48 << 20
_COPIES = 3  # logits in the model's type and in float32, and their softmax


def compute(
    model: Decoder, states: tuple[Tensor, Tensor], spans: Spans, rows: Rows
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """By row: what position ``start`` and those after it say of the prompt token that follows each."""
    wanted = rows.num_prompt_logprobs[spans.rows]
    told: dict[int, tuple[TokenLogprobs, ...]] = {}
    offsets = np.cumsum(spans.ends - spans.starts) - (spans.ends - spans.starts)
    for index in np.flatnonzero(wanted >= 0):
        row, start = int(spans.rows[index]), int(spans.starts[index])
        started = rows.started[row]
        assert started is not None
        end = min(int(spans.ends[index]), started.num_prompt_tokens - 1)
        if end > start:
            places = offsets[index] + np.arange(end - start)
            told[row] = _told(model, states, places, rows.tokens[row, start + 1 : end + 1], wanted[index])
    return told


def _told(
    model: Decoder, states: tuple[Tensor, Tensor], places: np.ndarray, targets: np.ndarray, wanted: int
) -> tuple[TokenLogprobs, ...]:
    size = max(1, _WORKSPACE_BYTES // (_COPIES * 4 * model.config.vocab_size))
    told: list[TokenLogprobs] = []
    for begin in range(0, len(places), size):
        part = slice(begin, begin + size)
        logits = model.logits(states, from_numpy(places[part])).float().cpu()
        told += logprobs(logits, targets[part], np.full(len(logits), wanted)).values()
    return tuple(told)
