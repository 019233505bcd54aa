"""What the device keeps of the running requests, so that a decode step brings it three numbers a row.

Owned by ``device_steps``. The newest token of a row need not be known to the host: it is here as soon as it
was sampled, and the next step takes it from here. Changed by each Step's differences, in the device's order.
"""

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.step import Step
from quire_server.layers.forward_batch import ForwardBatch
from quire_server.models.config import ModelConfig
from quire_server.runner import batch
from quire_server.runner.device import Device
from quire_server.runner.rows import Rows

#: In place of a token: the host does not know it yet.
ON_DEVICE = -1


class DeviceRows:
    """Tensors indexed by row; the last one, ``padding``, is nobody's."""

    def __init__(self, rows: Rows, device: Device) -> None:
        num_rows, num_columns = rows.block_table.shape
        count, place = num_rows + 1, device.place
        self.padding = num_rows
        self.newest = torch.zeros(count, dtype=torch.int64, device=place)
        self._given = torch.zeros(count, dtype=torch.int64, device=place)  # the newest before this step's
        self.block_table = torch.zeros(count, num_columns, dtype=torch.int64, device=place)
        self.temperature = torch.zeros(count, dtype=torch.float32, device=place)
        self.top_k = torch.zeros(count, dtype=torch.int64, device=place)
        self.top_p = torch.ones(count, dtype=torch.float32, device=place)
        self.min_p = torch.zeros(count, dtype=torch.float32, device=place)
        self.seed = torch.zeros(count, dtype=torch.int64, device=place)
        self._host = rows
        self._device = device

    def apply(self, step: Step) -> None:
        """Rows that start and tables that grow, after the host's rows have them."""
        host, upload = self._host, self._device.upload
        if step.started:
            ids = np.array([started.row for started in step.started], np.int64)
            index = upload(ids)
            for mine, theirs in (
                (self.block_table, host.block_table),
                (self.temperature, host.temperature),
                (self.top_k, host.top_k),
                (self.top_p, host.top_p),
                (self.min_p, host.min_p),
                (self.seed, host.seed),
            ):
                mine[index] = upload(theirs[ids])
        if step.grown:
            rows, columns, block_ids = upload(self._growth(step.grown))
            self.block_table[rows, columns] = block_ids

    def entries(
        self,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        shape: tuple[int, int],
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(i64 [3, *shape]: row, position and token of each of ``counts`` tokens, which are the last ones of
        their sequence; which of them there are). The rest is padding.
        """
        sequences, tokens = shape
        entries = np.empty((3, sequences, tokens), np.int64)
        entries[0], entries[1], entries[2] = self.padding, -1, 0
        is_there = np.zeros(shape, bool)
        is_there[: len(rows)] = np.arange(tokens) >= tokens - counts[:, None]
        row_ids, positions = np.repeat(rows, counts), batch.ranges(starts, counts)
        entries[0, is_there], entries[1, is_there] = row_ids, positions
        entries[2, is_there] = self._host.tokens[row_ids, positions]
        return entries, is_there

    def batch(self, entries: Tensor, config: ModelConfig) -> ForwardBatch:
        """Every token of ``entries`` i64 [3, sequences, tokens], by arithmetic that can be captured. Padding
        has slot -1, where nothing is written, and a sequence of padding no length.
        """
        rows, starts, token_ids = entries.flatten(1)
        last_rows, last_starts = entries[:2, :, -1]
        size = self._host.block_size
        positions = starts.clamp(min=0)
        places = self.block_table[rows, positions // size] * size + positions % size
        return batch.decodes(
            self.known(token_ids, rows),
            positions,
            places.masked_fill(starts < 0, -1),
            self.block_table[last_rows],
            last_starts + 1,
            shape=(config.num_kv_heads, size),
            windows=config.windows,
        )

    def known(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Token ids of a step, those that the host did not know taken from their rows; all i64 [T]."""
        found = torch.where(token_ids == ON_DEVICE, self.newest[rows], token_ids)
        self._given[rows] = found  # of a row with several, any: those the host knows
        return found

    def contexts(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Tokens i64 [S, length] that came before what the step in hand samples, for rows i64 [S]; one of a
        row may be unknown to the host. A graph has put its own choice in the place of the newest by now.
        """
        return torch.where(token_ids == ON_DEVICE, self._given[rows][:, None], token_ids)

    def _growth(self, grown: tuple[tuple[int, int], ...]) -> NDArray[np.int64]:
        """i64 [3, blocks]: row, column and block; a row's last one stands at its table's end."""
        seen = Counter[int]()
        found = []
        for row, block_id in reversed(grown):
            seen[row] += 1
            found.append((row, self._host.num_blocks[row] - seen[row], block_id))
        return np.array(found, np.int64).T.copy()
