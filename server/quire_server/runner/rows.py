"""The persistent batch: one row per running request, changed by each Step's differences, never rebuilt.

Owned by ``model_runner``; read by ``batch`` (tokens, block tables) and ``sampler`` (parameters).
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from quire_server.core.step import StartedRow, Step


class Rows:
    """Host arrays indexed by row."""

    def __init__(self, num_rows: int, max_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.zeros((num_rows, max_len), np.int64)
        self.block_table = np.zeros((num_rows, -(-max_len // block_size)), np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.adjusts = np.zeros(num_rows, bool)  # whether a processor changes the row's logits
        self.penalises = np.zeros(num_rows, bool)  # of those: by what its context says
        self.edits = np.zeros(num_rows, bool)  # by anything else
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.repetition = np.ones(num_rows, np.float32)
        self.presence = np.zeros(num_rows, np.float64)
        self.frequency = np.zeros(num_rows, np.float64)
        self.seed = np.zeros(num_rows, np.int64)
        self.min_total = np.zeros(num_rows, np.int64)  # below so many tokens no stop token may be sampled
        self.num_logprobs = np.full(num_rows, -1, np.int64)  # -1: none wanted
        self.num_prompt_logprobs = np.full(num_rows, -1, np.int64)
        self.has_grammar = np.zeros(num_rows, bool)
        self.started: list[StartedRow | None] = [None] * num_rows
        self.epoch = np.zeros(num_rows, np.int64)  # how many requests have had the row

    def apply(self, step: Step) -> None:
        """Take in rows that start, tables that grow, and drafts, which stand after a row's newest token."""
        for started in step.started:
            self._start(started)
        for row, block_id in step.grown:
            self.block_table[row, self.num_blocks[row]] = block_id
            self.num_blocks[row] += 1
        if step.drafts:
            newest = dict(zip(step.rows, step.starts, strict=True))
            for row, drafts in step.drafts:
                begin = newest[row] + 1
                self.tokens[row, begin : begin + len(drafts)] = drafts

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the tokens at these positions of these rows lie in the cache."""
        blocks: NDArray[np.int64] = self.block_table[rows, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def holds(
        self,
        index: int,
        row_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        tokens: NDArray[np.int64],
        eos_ids: Iterable[int],
    ) -> bool:
        """Whether a sampled position is going to be a part of the answer: each draft in its context is what
        was sampled in its place, at the positions before, and none of them ends the answer.
        """
        row = row_ids[index]
        before = np.flatnonzero((row_ids == row) & (lengths < lengths[index]))
        if not before.size:
            return True
        started = self.started[row]
        assert started is not None
        ends = {*started.sampling.stop_token_ids, *(() if started.sampling.ignore_eos else eos_ids)}
        sampled = tokens[before].tolist()
        return self.tokens[row, lengths[before]].tolist() == sampled and ends.isdisjoint(sampled)

    def table(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The block tables of these rows, as wide as the longest has to be for so many tokens."""
        widest = -(-int(lengths.max(initial=0)) // self.block_size)
        table: NDArray[np.int64] = self.block_table[rows, :widest]
        return table

    def _start(self, started: StartedRow) -> None:
        row, sampling, table = started.row, started.sampling, started.block_ids
        self.started[row] = started
        self.epoch[row] += 1
        self.tokens[row, : len(started.token_ids)] = started.token_ids
        # Entries past the end repeat the first block: padding never reads another request's blocks.
        self.block_table[row] = table[0]
        self.block_table[row, : len(table)] = table
        self.num_blocks[row] = len(table)
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.adjusts[row] = sampling.adjusts_logits
        self.penalises[row], self.edits[row] = sampling.penalises, sampling.edits_logits
        self.num_prompt[row] = started.num_prompt_tokens
        self.repetition[row] = sampling.repetition_penalty
        self.presence[row], self.frequency[row] = sampling.presence_penalty, sampling.frequency_penalty
        self.seed[row] = np.uint64(started.seed & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
        self.has_grammar[row] = sampling.grammar is not None
        # With a grammar, ``grammars`` sees to it: a complete answer ends, however short it is.
        min_tokens = 0 if sampling.grammar is not None else sampling.min_tokens
        self.min_total[row] = started.num_prompt_tokens + min_tokens
        self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self.num_prompt_logprobs[row] = -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs
