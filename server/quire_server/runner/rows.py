"""The persistent batch: one row per running request, changed by each Step's differences, never rebuilt.

Owned by ``model_runner``; read by ``batch`` (tokens, block tables) and ``sampler`` (parameters).
"""

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
        self.seed = np.zeros(num_rows, np.int64)
        self.min_total = np.zeros(num_rows, np.int64)  # below so many tokens no stop token may be sampled
        self.num_logprobs = np.full(num_rows, -1, np.int64)  # -1: none wanted
        self.num_prompt_logprobs = np.full(num_rows, -1, np.int64)
        self.started: list[StartedRow | None] = [None] * num_rows

    def apply(self, step: Step) -> None:
        """Take in rows that start and tables that grow."""
        for started in step.started:
            self._start(started)
        for row, block_id in step.grown:
            self.block_table[row, self.num_blocks[row]] = block_id
            self.num_blocks[row] += 1

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the tokens at these positions of these rows lie in the cache."""
        blocks: NDArray[np.int64] = self.block_table[rows, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def table(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The block tables of these rows, as wide as the longest has to be for so many tokens."""
        widest = -(-int(lengths.max(initial=0)) // self.block_size)
        table: NDArray[np.int64] = self.block_table[rows, :widest]
        return table

    def _start(self, started: StartedRow) -> None:
        row, sampling, table = started.row, started.sampling, started.block_ids
        self.started[row] = started
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
        self.seed[row] = np.uint64(started.seed & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
        self.min_total[row] = started.num_prompt_tokens + sampling.min_tokens
        self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self.num_prompt_logprobs[row] = -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs
