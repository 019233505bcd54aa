"""GpuInputBatch: the part of the input batch that stays on the GPU, so that a decode step uploads three
numbers per token.

The newest token of a row may be known to the GPU only: the next step reads it from here as soon as it is
sampled. Updated by the differences in each Step, in the order of the GPU's stream.
"""

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.step import Step
from quire_server.layers.forward_batch import ForwardBatch
from quire_server.models.config import ModelConfig
from quire_server.runner import batch_builder
from quire_server.runner.gpu.device import Device
from quire_server.runner.input_batch import SAMPLING_COLUMNS, InputBatch

#: In place of a token id: sampled on the GPU, and not yet known to the host.
ON_DEVICE = -1


_PIECE = 1024  # contexts are read in pieces of this size, so that their width takes few values


class GpuInputBatch:
    """Tensors indexed by row; the last row, ``padding``, belongs to no request."""

    def __init__(self, input_batch: InputBatch, device: Device) -> None:
        num_rows, num_columns = input_batch.block_table.shape
        count, place = num_rows + 1, device.place
        self.padding = num_rows
        self.newest = torch.zeros(count, dtype=torch.int64, device=place)
        # Each row's input token of this step.
        self._given = torch.zeros(count, dtype=torch.int64, device=place)
        self.block_table = torch.zeros(count, num_columns, dtype=torch.int64, device=place)
        self.sampling = {
            name: device.upload(np.full(count, default, dtype))
            for name, (dtype, default) in SAMPLING_COLUMNS.items()
        }
        self.seed = torch.zeros(count, dtype=torch.int64, device=place)
        # Tokens of the rows that have a penalty, of which so many leading ones are right. Allocated with the
        # first one: in the memory profile's step, which counts it, and where a request needs it.
        self._contexts: Tensor | None = None
        self._num_noted = np.zeros(num_rows, np.int64)
        self.adapter_slot = torch.full((count,), -1, dtype=torch.int64, device=place)
        self._host = input_batch
        self._device = device

    def apply(self, step: Step) -> None:
        """Copy rows that start and blocks that were allocated, after the host's input batch has them."""
        host, upload = self._host, self._device.upload
        if step.started:
            ids = np.array([started.row for started in step.started], np.int64)
            index = upload(ids)
            pairs = [(self.block_table, host.block_table), (self.seed, host.seed)]
            pairs += [(self.adapter_slot, host.adapter_slot)]
            pairs += [(column, host.sampling[name]) for name, column in self.sampling.items()]
            for mine, theirs in pairs:
                mine[index] = upload(theirs[ids])
            self._num_noted[ids] = 0
        if step.new_blocks:
            rows, columns, block_ids = upload(self._growth(step.new_blocks))
            self.block_table[rows, columns] = block_ids

    def entries(
        self,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        shape: tuple[int, int],
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(i64 [3, *shape]: row, position and token id of the last ``counts`` tokens of each sequence; bool
        [*shape]: which entries are not padding).
        """
        sequences, tokens = shape
        entries = np.empty((3, sequences, tokens), np.int64)
        entries[0], entries[1], entries[2] = self.padding, -1, 0
        is_real = np.zeros(shape, bool)
        is_real[: len(rows)] = np.arange(tokens) >= tokens - counts[:, None]
        row_ids, positions = np.repeat(rows, counts), batch_builder.ranges(starts, counts)
        entries[0, is_real], entries[1, is_real] = row_ids, positions
        entries[2, is_real] = self._host.tokens[row_ids, positions]
        return entries, is_real

    def batch(self, entries: Tensor, config: ModelConfig) -> ForwardBatch:
        """The ForwardBatch of ``entries`` i64 [3, sequences, tokens], computed by operations that a graph can
        capture. Padding has slot -1, which is not written, and a padding sequence has length 0.
        """
        rows, starts, token_ids = entries.flatten(1)
        last_rows, last_starts = entries[:2, :, -1]
        size = self._host.block_size
        positions = starts.clamp(min=0)
        places = self.block_table[rows, positions // size] * size + positions % size
        return batch_builder.decodes(
            self.known(token_ids, rows),
            positions,
            places.masked_fill(starts < 0, -1),
            self.block_table[last_rows],
            last_starts + 1,
            shape=(config.num_kv_heads, size),
            windows=config.windows,
        )

    def known(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Token ids of a step with ON_DEVICE replaced by the row's newest token; all i64 [T]."""
        found = torch.where(token_ids == ON_DEVICE, self.newest[rows], token_ids)
        self._given[rows] = found  # several tokens of one row are all known to the host
        return found

    def store(self, rows: NDArray[np.int64], tokens: Tensor) -> None:
        """Note the newest tokens i64 [S] of rows; a negative one is none."""
        self.newest[self._device.upload(rows)] = tokens.clamp(min=0)

    def contexts(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tensor:
        """Tokens i32 [rows, width], of which those of the positions that this step samples are right up to
        these ``lengths``. Uploads what the last call for a row did not have: its prompt once, then one token
        of each step, and drafts. A token that only the device knows is not ``newest``: a graph has already
        stored there what it sampled.
        """
        if self._contexts is None:
            shape = len(self.newest), _whole_pieces(self._host.tokens.shape[1])
            self._contexts = torch.zeros(shape, dtype=torch.int32, device=self._device.place)
        starts = np.minimum(self._num_noted[rows], lengths - 1)
        counts = lengths - starts
        row_ids, columns = np.repeat(rows, counts), batch_builder.ranges(starts, counts)
        self._num_noted[rows] = lengths  # of several positions of a row the last one is the longest
        on_device, places, given = self._device.upload(
            np.stack((row_ids, columns, self._host.tokens[row_ids, columns]))
        )
        known = torch.where(given == ON_DEVICE, self._given[on_device], given)
        self._contexts[on_device, places] = known.int()
        return self._contexts[:, : _whole_pieces(int(lengths.max()))]

    def forget_contexts(self, rows: NDArray[np.int64]) -> None:
        """Have ``contexts`` upload all tokens of these rows again."""
        self._num_noted[rows] = 0

    def _growth(self, grown: tuple[tuple[int, int], ...]) -> NDArray[np.int64]:
        """i64 [3, blocks]: row, column and block id; the last block that a row got is at the end of its
        table.
        """
        seen = Counter[int]()
        found = []
        for row, block_id in reversed(grown):
            seen[row] += 1
            found.append((row, self._host.num_blocks[row] - seen[row], block_id))
        return np.array(found, np.int64).T.copy()


def _whole_pieces(length: int) -> int:
    return -(-length // _PIECE) * _PIECE
