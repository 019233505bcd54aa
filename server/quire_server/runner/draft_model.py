"""The draft model: a smaller model with the same tokenizer that says first what the model then checks.

Called by ``model_runner`` with each step. Its keys and values lie in caches of its own under the same block
ids, so that it needs no bookkeeping of blocks. What it computed is nobody's property: it is found again while
the block is the same, and computed again otherwise (after a preemption, from a lower tier), when a row wishes
for drafts and not before, so that rows without drafts cost it nothing. It samples as the model does, with the
same noise (ADR 0013). Decides nothing: how many drafts are wished for is the scheduler's business.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from quire_server.core.step import Step
from quire_server.models.decoder import Decoder
from quire_server.runner import batch, out_of_memory
from quire_server.runner.device_steps import DeviceSteps
from quire_server.runner.rows import Rows
from quire_server.runner.static_decode import StaticDecode

#: (logits [S, V], rows [S], lengths of their contexts [S]) -> token ids, which it has written to the rows.
Choose = Callable[[Tensor, NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]

logger = logging.getLogger(__name__)

_FEW = 2  # tokens that a row lacks after a draft: its own last one, and the model's


class _Piece(NamedTuple):
    row: int
    start: int
    num_tokens: int
    is_sampled: bool


class DraftModel:
    """Proposes tokens for the rows of the model, which are its own as well."""

    def __init__(
        self,
        model: Decoder,
        kv_caches: tuple[Tensor, ...],
        rows: Rows,
        *,
        vocab_size: int,
        step_tokens: int,
        device: DeviceSteps | None = None,
    ) -> None:
        """``vocab_size`` is the model's; ``step_tokens``: of contexts that it reads in one step; ``device``:
        the draft model where both are on one. What it says is sampled on the host all the same.
        """
        self._device = device
        self._model = model
        self._kv_caches = kv_caches
        self._rows = rows
        self._static_decode = StaticDecode.of(model, kv_caches, *rows.block_table.shape)
        self._vocab_size = vocab_size
        self._step_tokens = step_tokens
        self._ready = np.zeros(rows.num_blocks.shape[0], np.int64)  # leading tokens of each row in the cache
        self._is_full = np.zeros(kv_caches[0].shape[1], bool)  # blocks whose present content is in the cache
        self._guesses: dict[int, tuple[int, list[int]]] = {}  # row -> where its latest drafts begin, and they

    def follow(self, step: Step) -> None:
        """Blocks that get a new content hold nothing yet; rows that start find what is there of theirs."""
        if self._device is not None:
            self._device.apply(step)
        loaded = () if step.copies is None else step.copies.loads
        fresh = [block_id for _, block_id in (*step.grown, *loaded)]
        starts = dict(zip(step.rows, step.starts, strict=True)) if step.started else {}
        for started in step.started:
            fresh += started.block_ids[starts[started.row] // self._rows.block_size :]
        self._is_full[fresh] = False
        for started in step.started:
            is_full = self._is_full[list(started.block_ids)]
            num_full = len(is_full) if is_full.all() else int(is_full.argmin())
            self._ready[started.row] = num_full * self._rows.block_size
            self._guesses.pop(started.row, None)

    def propose(self, step: Step, choose: Choose) -> tuple[Step, float]:
        """The step with drafts instead of wishes, and the seconds that they took: 0 when contexts had to be
        read first, which says nothing about the next time. A row whose context takes longer gets none yet,
        and no row gets any where there is no memory for them: they would only have saved time.
        """
        try:
            return self._propose(step, choose)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory.is_out_of_memory(error):
                raise
        logger.error("out of memory in the draft model", extra={"rows": len(step.wishes)})
        for row, _ in step.wishes:
            self._forget(row)
        return _with_drafts(step, {row: [] for row, _ in step.wishes}), 0.0

    def _propose(self, step: Step, choose: Choose) -> tuple[Step, float]:
        began_at = time.perf_counter()
        newest = dict(zip(step.rows, step.starts, strict=True))
        wishes = dict(step.wishes)
        drafts: dict[int, list[int]] = {row: [] for row in wishes}
        pieces = self._lacking({row: newest[row] + 1 for row in wishes})
        is_usual = all(piece.num_tokens <= _FEW for piece in pieces)
        while pieces:
            rows = self._compute(pieces, drafts, choose)
            pieces = [
                _Piece(row, newest[row] + len(drafts[row]), 1, is_sampled=True)
                for row in rows
                if len(drafts[row]) < wishes[row]
            ]
        self._guesses.update({row: (newest[row] + 1, tokens) for row, tokens in drafts.items() if tokens})
        seconds = time.perf_counter() - began_at if is_usual else 0.0
        return _with_drafts(step, drafts), seconds

    def _forget(self, row: int) -> None:
        """Nobody knows what of the row's context is in the cache."""
        self._is_full[self._rows.block_table[row, : self._rows.num_blocks[row]]] = False
        self._ready[row] = 0
        self._guesses.pop(row, None)

    def _lacking(self, lengths: dict[int, int]) -> list[_Piece]:
        """What of each row's context is still to be computed, as far as a step goes; single tokens first."""
        pieces, budget = list[_Piece](), self._step_tokens
        for row, length in lengths.items():
            self._keep_right_guesses(row, length)
            start = int(self._ready[row])
            count = min(length - start, budget)
            if count:
                pieces.append(_Piece(row, start, count, is_sampled=start + count == length))
                self._advance(row, start + count)
            budget -= count
        return sorted(pieces, key=lambda piece: piece.num_tokens != 1)

    def _keep_right_guesses(self, row: int, length: int) -> None:
        """Drafts that became tokens are computed already, but for the last one."""
        if row not in self._guesses:
            return
        begin, tokens = self._guesses.pop(row)
        actual = self._rows.tokens[row, begin : min(length, begin + len(tokens)) - 1].tolist()
        wrong = (index for index, token in enumerate(actual) if token != tokens[index])
        self._advance(row, begin + next(wrong, len(actual)))

    def _advance(self, row: int, ready: int) -> None:
        size = self._rows.block_size
        self._is_full[self._rows.block_table[row, self._ready[row] // size : ready // size]] = True
        self._ready[row] = ready

    def _compute(self, pieces: list[_Piece], drafts: dict[int, list[int]], choose: Choose) -> list[int]:
        """One forward pass; returns the rows that gained a draft."""
        rows, starts, counts, is_sampled = zip(*pieces, strict=True)
        step = Step(0, (), (), rows, starts, counts, tuple(map(int, is_sampled)))
        spans = batch.Spans.of(step)
        logits = self._forward(step, spans).float()
        if not spans.sampled_rows.size:
            return []
        padding = self._vocab_size - logits.shape[1]  # vocabularies of a tokenizer, padded to other widths
        logits = functional.pad(logits, (0, padding), value=float("-inf")) if padding else logits
        gained: list[int] = spans.sampled_rows.tolist()
        tokens = choose(logits, spans.sampled_rows, spans.sampled_lengths)
        for row, token in zip(gained, tokens.tolist(), strict=True):
            drafts[row].append(token)
        return gained

    def _forward(self, step: Step, spans: batch.Spans) -> Tensor:
        if self._device is not None:
            return self._device.compute(step, spans).logits.cpu()
        if self._static_decode is not None and self._static_decode.takes(step):
            return self._static_decode(spans, self._rows)
        config = self._model.config
        forward_batch = batch.build(step, spans, self._rows, config.num_kv_heads, config.windows)
        if config.vocab_size < self._vocab_size:
            forward_batch.token_ids.clamp_(max=config.vocab_size - 1)
        return self._model(forward_batch, self._kv_caches)


def _with_drafts(step: Step, drafts: dict[int, list[int]]) -> Step:
    """Each row that wished computes and samples as many tokens as it has now."""

    def counted(numbers: tuple[int, ...]) -> tuple[int, ...]:
        pairs = zip(step.rows, numbers, strict=True)
        return tuple([1 + len(drafts[row]) if row in drafts else number for row, number in pairs])

    return dataclasses.replace(
        step,
        num_tokens=counted(step.num_tokens),
        samples=counted(step.samples),
        drafts=tuple([(row, tuple(tokens)) for row, tokens in drafts.items()]),
        wishes=(),
    )
