"""Samples token ids from logits on the host, each row by its own parameters and noise, and computes
log-probabilities of output and prompt tokens.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from quire_server.core.step import NOT_FINITE, NOTHING_ALLOWED, TokenLogprobs
from quire_server.core.watermark import Watermark
from quire_server.layers.ops import sample_tokens, token_logprobs
from quire_server.models.decoder import Decoder
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.input_batch import SAMPLING_COLUMNS, InputBatch
from quire_server.runner.logits_processors import adjust

GREEDY_BELOW = 1e-5  # a smaller temperature would overflow, and picks the likeliest token in any case


def sample(
    logits: Tensor,
    input_batch: InputBatch,
    row_ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    eos_ids: Collection[int],
    watermark: Watermark | None = None,
) -> tuple[NDArray[np.int64], dict[int, str]]:
    """(token ids i64 [S], failures by position). logits f32 [S, V] are changed in place.

    The context of position i is ``input_batch.tokens[row_ids[i], : lengths[i]]``; a row may occur several
    times.
    """
    for index in np.flatnonzero(input_batch.adjusts[row_ids]):
        row, length = row_ids[index], lengths[index]
        started = input_batch.started[row]
        assert started is not None
        context = input_batch.tokens[row, :length]
        adjust(logits[index], context, started.num_prompt_tokens, started.sampling, watermark)
    for index in np.flatnonzero(lengths < input_batch.min_total[row_ids]):
        if banned := stop_ids(input_batch, int(row_ids[index]), eos_ids, logits.shape[1]):
            logits[index, banned] = float("-inf")
    tokens, best = (one.numpy() for one in _sample_tokens(logits, input_batch, row_ids, lengths))
    return tokens, _failures(tokens, best)


def needs_only_largest(
    input_batch: InputBatch, row_ids: NDArray[np.int64], lengths: NDArray[np.int64]
) -> bool:
    """Whether ``likeliest`` gives the tokens that ``sample`` would, and nothing else of the logits is
    needed.
    """
    needs_all = input_batch.adjusts[row_ids] | input_batch.has_grammar[row_ids]
    needs_all |= input_batch.sampling["temperature"][row_ids] >= GREEDY_BELOW
    needs_all |= input_batch.num_logprobs[row_ids] >= 0
    needs_all |= lengths < input_batch.min_total[row_ids]
    return not needs_all.any()


def likeliest(largest: Tensor) -> tuple[NDArray[np.int64], dict[int, str]]:
    """As ``sample``, from the largest logit of each position and its token, f32 [S, 2]."""
    best, tokens = largest.numpy().T
    chosen = tokens.astype(np.int64)
    return chosen, _failures(chosen, best)


def _failures(tokens: NDArray[np.int64], best: NDArray[np.float32]) -> dict[int, str]:
    """By position whose largest logit is no finite number; its token becomes 0."""
    failures = {}
    is_sound = np.isfinite(best)
    if not is_sound.all():
        for index in np.flatnonzero(~is_sound):
            failures[int(index)] = NOTHING_ALLOWED if best[index] == float("-inf") else NOT_FINITE
            tokens[index] = 0
    return failures


def logprobs(
    logits: Tensor, tokens: NDArray[np.int64], wanted: NDArray[np.int64]
) -> dict[int, TokenLogprobs]:
    """By position: the log-probability of the token there and of the ``wanted`` likeliest ones (i64 [S], -1:
    not requested), from the model's own distribution; logits f32 [S, V].
    """
    asking = np.flatnonzero(wanted >= 0)
    if not asking.size:
        return {}
    widest = min(int(wanted.max()), logits.shape[1])
    found = token_logprobs(logits[asking], torch.from_numpy(tokens[asking]), widest)
    return listed(asking, wanted[asking], tokens[asking], *(part.numpy() for part in found))


def listed(
    asking: NDArray[np.int64],
    wanted: NDArray[np.int64],
    tokens: NDArray[np.int64],
    values: NDArray[np.float32],
    top_values: NDArray[np.float32],
    top_ids: NDArray[np.int64],
) -> dict[int, TokenLogprobs]:
    """By the positions ``asking`` i64 [A]: the log-probabilities ``values`` f32 [A] of ``tokens`` i64 [A],
    and of the ``wanted`` i64 [A] first ones of the likeliest tokens [A, n].
    """
    return {
        index: TokenLogprobs(token, value, tuple(zip(ids[:count], tops[:count], strict=True)))
        for index, count, token, value, tops, ids in zip(
            asking.tolist(),
            wanted.tolist(),
            tokens.tolist(),
            values.tolist(),
            top_values.tolist(),
            top_ids.tolist(),
            strict=True,
        )
    }


def _sample_tokens(
    logits: Tensor, input_batch: InputBatch, row_ids: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """Tokens i64 [S] and largest logits f32 [S]."""
    sampling = {name: from_numpy(input_batch.sampling[name][row_ids]) for name in SAMPLING_COLUMNS}
    temperature = sampling["temperature"]
    return sample_tokens(
        logits,
        torch.arange(len(row_ids)),
        temperature.where(temperature >= GREEDY_BELOW, 0.0),
        sampling["top_k"],
        sampling["top_p"],
        sampling["min_p"],
        from_numpy(input_batch.seed[row_ids]),
        from_numpy(lengths),
    )


def stop_ids(input_batch: InputBatch, row: int, eos_ids: Collection[int], vocab_size: int) -> list[int]:
    """The tokens that end the answer of a row, which ``min_tokens`` bans."""
    started = input_batch.started[row]
    assert started is not None
    sampling = started.sampling
    ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
    return sorted(token for token in ids if token < vocab_size)


_PROMPT_LOGITS_BYTES = 48 << 20
_LOGITS_COPIES = 3  # logits in the model's dtype, in float32, and their softmax


class PromptPositions(NamedTuple):
    """The positions of a prompt in a step of which log-probabilities are requested."""

    row: int
    places: NDArray[np.int64]  # indices into the step's tokens
    targets: NDArray[np.int64]  # the prompt token after each position
    wanted: int  # most likely tokens to report


def prompt_positions(layout: StepLayout, input_batch: InputBatch) -> list[PromptPositions]:
    """The prompt positions of a step that have a next prompt token, of rows that request log-probabilities
    of prompts.
    """
    wanted = input_batch.num_prompt_logprobs[layout.rows]
    found: list[PromptPositions] = []
    offsets = np.cumsum(layout.ends - layout.starts) - (layout.ends - layout.starts)
    for index in np.flatnonzero(wanted >= 0):
        row, start = int(layout.rows[index]), int(layout.starts[index])
        started = input_batch.started[row]
        assert started is not None
        end = min(int(layout.ends[index]), started.num_prompt_tokens - 1)
        if end > start:
            places = offsets[index] + np.arange(end - start)
            targets = input_batch.tokens[row, start + 1 : end + 1].copy()
            found.append(PromptPositions(row, places, targets, int(wanted[index])))
    return found


def prompt_logprobs(
    model: Decoder, states: tuple[Tensor, Tensor] | None, positions: Sequence[PromptPositions]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Log-probabilities by row. The logits of all positions of a prompt would be gigabytes, so a few
    positions are computed at a time.
    """
    return {one.row: _prompt_logprobs_at(model, states, one) for one in positions}


def prompt_chunks(positions: Sequence[PromptPositions], vocab_size: int) -> list[int]:
    """The numbers of positions for which ``prompt_logprobs`` computes logits, one after the other."""
    size = _chunk_size(vocab_size)
    counts = [len(one.places) for one in positions]
    return [min(size, count - begin) for count in counts for begin in range(0, count, size)]


def _chunk_size(vocab_size: int) -> int:
    return max(1, _PROMPT_LOGITS_BYTES // (_LOGITS_COPIES * 4 * vocab_size))


def _prompt_logprobs_at(
    model: Decoder, states: tuple[Tensor, Tensor] | None, positions: PromptPositions
) -> tuple[TokenLogprobs, ...]:
    _, places, targets, wanted = positions
    size = _chunk_size(model.config.vocab_size)
    found: list[TokenLogprobs] = []
    for begin in range(0, len(places), size):
        part = slice(begin, begin + size)
        logits = model.logits(states, from_numpy(places[part])).float().cpu()
        if not model.config.topology.is_leader:
            continue  # the logits are those of a part of the vocabulary
        found += logprobs(logits, targets[part], np.full(len(logits), wanted)).values()
    return tuple(found)
