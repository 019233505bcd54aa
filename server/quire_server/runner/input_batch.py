"""The persistent batch: one row per running request, updated by the differences in each Step, never rebuilt.

The host's arrays. ``batch_builder`` reads tokens and block tables from them, ``sampler`` the sampling
parameters; ``gpu.input_batch`` holds the part of them that a GPU needs. Must not know the model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import StartedRow, Step

#: Sampling parameters with one array each, by their names in SamplingParams: type, and the value of a row
#: that no request has used yet. The sampling step of a GPU has a copy of each of these.
SAMPLING_COLUMNS: dict[str, tuple[type, float]] = {
    "temperature": (np.float32, 0.0),
    "top_k": (np.int64, 0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
}
#: The same, for parameters that only the host keeps: they are uploaded when a step needs them.
PENALTY_COLUMNS: dict[str, tuple[type, float]] = {
    "repetition_penalty": (np.float32, 1.0),
    "presence_penalty": (np.float64, 0.0),
    "frequency_penalty": (np.float64, 0.0),
}


@dataclass(frozen=True, slots=True)
class SampledPositions:
    """Positions at which a step samples, while it is in flight. A row may get another request meanwhile,
    which must not get the tokens.
    """

    rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    _epochs: NDArray[np.int64]

    def are_current(self, input_batch: "InputBatch") -> NDArray[np.bool_]:
        """Which rows have the same request as before."""
        current: NDArray[np.bool_] = input_batch.epoch[self.rows] == self._epochs
        return current

    def write(self, tokens: NDArray[np.int64], input_batch: "InputBatch") -> None:
        """Write one token for each position behind its context."""
        is_same = self.are_current(input_batch)
        input_batch.write(self.rows[is_same], self.lengths[is_same], tokens[is_same])


class InputBatch:
    """Host arrays indexed by row."""

    def __init__(self, num_rows: int, max_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.zeros((num_rows, max_len), np.int64)
        self.block_table = np.zeros((num_rows, -(-max_len // block_size)), np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.table_version = 0  # changes with each change of a block table
        self.sampling: dict[str, NDArray[Any]] = {
            name: np.full(num_rows, default, dtype)
            for name, (dtype, default) in (SAMPLING_COLUMNS | PENALTY_COLUMNS).items()
        }
        self.seed = np.zeros(num_rows, np.int64)
        self.adjusts = np.zeros(num_rows, bool)  # any logits processor applies to the row
        self.penalises = np.zeros(num_rows, bool)  # one of them is a penalty, which depends on the context
        self.edits = np.zeros(num_rows, bool)  # one of them is not a penalty
        self.follows = np.zeros(num_rows, bool)  # and depends on the tokens of the answer
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.min_total = np.zeros(num_rows, np.int64)  # context length below which stop tokens are banned
        self.num_logprobs = np.full(num_rows, -1, np.int64)  # -1: not requested
        self.num_prompt_logprobs = np.full(num_rows, -1, np.int64)
        self.has_grammar = np.zeros(num_rows, bool)
        self.adapter_slot = np.full(num_rows, -1, np.int64)  # of the LoRA adapter; -1: none
        self.started: list[StartedRow | None] = [None] * num_rows
        self.epoch = np.zeros(num_rows, np.int64)  # number of requests that the row has had

    def apply(self, step: Step) -> None:
        """Add rows that start and blocks that were allocated, and write drafts behind each row's newest
        token.
        """
        for started in step.started:
            self._start(started)
        self.table_version += bool(step.started or step.new_blocks)
        for row, block_id in step.new_blocks:
            self.block_table[row, self.num_blocks[row]] = block_id
            self.num_blocks[row] += 1
        if step.drafts:
            newest = dict(zip(step.rows, step.starts, strict=True))
            for row, drafts in step.drafts:
                begin = newest[row] + 1
                self.tokens[row, begin : begin + len(drafts)] = drafts

    def write(
        self, rows: NDArray[np.int64], lengths: NDArray[np.int64], tokens: NDArray[np.int64] | int
    ) -> None:
        """Write tokens behind their contexts of these lengths, except beyond the longest context."""
        inside = lengths < self.tokens.shape[1]
        given = tokens if isinstance(tokens, int) else tokens[inside]
        self.tokens[rows[inside], lengths[inside]] = given

    def positions(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> SampledPositions:
        """Remember sampled positions for the time when their tokens are known."""
        return SampledPositions(rows, lengths, self.epoch[rows])

    def request_id(self, row: int) -> str:
        """The request that has this row."""
        started = self.started[row]
        assert started is not None
        return started.request_id

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """KV cache slots (block id * block size + offset) of these positions of these rows."""
        blocks: NDArray[np.int64] = self.block_table[rows, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def is_accepted(
        self,
        index: int,
        row_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        tokens: NDArray[np.int64],
        eos_ids: Iterable[int],
    ) -> bool:
        """Whether the sampled position ``index`` becomes output: every draft in its context equals
        the token sampled at that position, and none of them ends the output.
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
        """Block tables of these rows, cut to the width that the largest of ``lengths`` needs."""
        widest = -(-int(lengths.max(initial=0)) // self.block_size)
        table: NDArray[np.int64] = self.block_table[rows, :widest]
        return table

    def _start(self, started: StartedRow) -> None:
        row, table = started.row, started.block_ids
        self.started[row] = started
        self.adapter_slot[row] = started.adapter_slot
        self.epoch[row] += 1
        self.tokens[row, : len(started.token_ids)] = started.token_ids
        # Entries beyond the end repeat the first block, so that padding never reads another request's blocks.
        self.block_table[row] = table[0]
        self.block_table[row, : len(table)] = table
        self.num_blocks[row] = len(table)
        self.num_prompt[row] = started.num_prompt_tokens
        self.seed[row] = np.uint64(started.seed & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
        self._set_sampling(row, started.num_prompt_tokens, started.sampling)

    def _set_sampling(self, row: int, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        for name, column in self.sampling.items():
            column[row] = getattr(sampling, name)
        self.adjusts[row] = sampling.adjusts_logits
        self.penalises[row], self.edits[row] = sampling.penalises, sampling.edits_logits
        self.follows[row] = sampling.edits_by_answer
        self.has_grammar[row] = sampling.grammar is not None
        # With a grammar ``structured_outputs`` applies min_tokens: a complete output ends, however short.
        min_tokens = 0 if sampling.grammar is not None else sampling.min_tokens
        self.min_total[row] = num_prompt_tokens + min_tokens
        self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self.num_prompt_logprobs[row] = -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs
