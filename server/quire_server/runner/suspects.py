"""Blocks of rows that failed with something else than numbers, until they are zeroed. Owned by
``model_runner``.

What is not a number must not wait behind a sequence's end: attention masks it, but still multiplies. A block
is zeroed when it comes to a new owner, not before: some may be shared.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from quire_server.core.step import Step
from quire_server.runner.rows import Rows


class Suspects:
    """Of one set of caches, [2, num_blocks, ...] each."""

    def __init__(self, rows: Rows, kv_caches: tuple[Tensor, ...]) -> None:
        self._rows = rows
        self._kv_caches = kv_caches
        self._blocks: set[int] = set()

    def add(self, rows: Iterable[int]) -> None:
        """The blocks that these rows have now."""
        for row in rows:
            self._blocks.update(self._rows.block_table[row, : self._rows.num_blocks[row]].tolist())

    def cleanse(self, step: Step) -> None:
        """Zero those that the step hands to somebody."""
        if not self._blocks:
            return
        starts = dict(zip(step.rows, step.starts, strict=True))
        size = self._rows.block_size
        handed = {block_id for _, block_id in step.grown}
        for row in step.started:
            cached = -(-starts.get(row.row, len(row.token_ids)) // size)
            handed.update(row.block_ids[cached:])
        dirty = sorted(handed & self._blocks)
        if dirty:
            for cache in self._kv_caches:
                cache[:, torch.tensor(dirty)] = 0
            self._blocks.difference_update(dirty)
