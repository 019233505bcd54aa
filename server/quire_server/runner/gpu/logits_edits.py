"""The logits processors of ``runner.logits_processors`` for all rows of a step at once, on the GPU.

``plan`` decides on the host which logits change, which depends on the contexts and not on the logits, so
that it can run while the GPU computes them. ``Edits`` carries it out in a few operations, however many rows
there are. The results are those of ``logits_processors.adjust``; penalties, which come between the biases and
the rest, are ``sampler.penalise``.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, where

from quire_server.core.watermark import Watermark
from quire_server.runner.input_batch import InputBatch
from quire_server.runner.logits_processors import completing, green_list, is_spent
from quire_server.runner.sampler import stop_ids

Upload = Callable[[NDArray[Any]], Tensor]

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Edits:
    """Which logits change. Lists of (position in the step, token id), and what belongs to each of them."""

    biased: list[tuple[int, int]] = field(default_factory=list)
    biases: list[float] = field(default_factory=list)
    allowed: list[tuple[int, int]] = field(default_factory=list)  # the only tokens of their positions
    banned: list[tuple[int, int]] = field(default_factory=list)
    green: list[tuple[int, NDArray[np.bool_]]] = field(default_factory=list)  # position, bool [V]
    delta: float = 0.0  # of the watermark
    ended: list[tuple[int, int]] = field(default_factory=list)  # thoughts, and the token that ends each
    early: list[tuple[int, int]] = field(default_factory=list)  # stop tokens before min_tokens

    def before_penalties(self, logits: Tensor, upload: Upload) -> None:
        """In place, logits f32 [S, V]."""
        if self.biased:
            biases = upload(np.array(self.biases, np.float32))
            logits.index_put_(_index(self.biased, upload), biases, accumulate=True)

    def after_penalties(self, logits: Tensor, upload: Upload) -> None:
        """In place, in the order of ``logits_processors.adjust``."""
        if self.allowed:
            index = _index(self.allowed, upload)
            kept = logits[index]
            logits.index_fill_(0, index[0], _NEVER)
            logits[index] = kept
        if self.banned:
            logits[_index(self.banned, upload)] = _NEVER
        if self.green:
            added = upload(np.stack([mask for _, mask in self.green])).float().mul_(self.delta)
            logits.index_add_(0, upload(np.array([place for place, _ in self.green], np.int64)), added)
        if self.ended:
            places, ends = index = _index(self.ended, upload)
            values = logits[index][:, None]
            only = logits.new_full((len(self.ended), logits.shape[1]), _NEVER).scatter_(
                1, ends[:, None], values
            )
            # Where a ban or a grammar forbids the end, no token would be left.
            logits[places] = where(values == _NEVER, logits[places], only)
        if self.early:
            logits[_index(self.early, upload)] = _NEVER


def follows_tokens(input_batch: InputBatch, row_ids: NDArray[np.int64]) -> bool:
    """Whether ``plan`` needs the values of the newest tokens of these rows."""
    return bool(input_batch.follows[row_ids].any())


def plan(
    input_batch: InputBatch,
    row_ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    eos_ids: Collection[int],
    vocab_size: int,
    watermark: Watermark | None,
) -> Edits:
    """The changes at context lengths ``lengths`` of rows, both i64 [S]."""
    edits = Edits(delta=0.0 if watermark is None else watermark.delta)
    for index in np.flatnonzero(input_batch.edits[row_ids]).tolist():
        row = int(row_ids[index])
        started = input_batch.started[row]
        assert started is not None
        sampling, context = started.sampling, input_batch.tokens[row, : lengths[index]]
        answer = context[started.num_prompt_tokens :]
        edits.biased.extend((index, token) for token, _ in sampling.logit_bias)
        edits.biases.extend(bias for _, bias in sampling.logit_bias)
        edits.allowed.extend((index, token) for token in sampling.allowed_token_ids)
        edits.banned.extend((index, token) for token in completing(answer, sampling.bad_words))
        if sampling.watermark and watermark is not None:
            edits.green.append((index, green_list(watermark, int(context[-1]), vocab_size)))
        if sampling.thinking is not None and is_spent(answer, sampling.thinking):
            edits.ended.append((index, sampling.thinking.end_token_id))
    for index in np.flatnonzero(lengths < input_batch.min_total[row_ids]).tolist():
        banned = stop_ids(input_batch, int(row_ids[index]), eos_ids, vocab_size)
        edits.early.extend((index, token) for token in banned)
    return edits


def _index(pairs: Iterable[tuple[int, int]], upload: Upload) -> tuple[Tensor, Tensor]:
    places, tokens = upload(np.array(list(pairs), np.int64).T.copy())
    return places, tokens
