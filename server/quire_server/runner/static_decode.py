"""Steps in which every row decodes, by one recording of the whole forward pass over tensors that stay where
they are. Owned by ``model_runner``, which computes everything else, and models that cannot be recorded.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from quire_server.layers.forward_batch import AttentionPlan, ForwardBatch
from quire_server.layers.recording import Recording, record
from quire_server.models.decoder import Decoder


class StaticDecode:
    """A batch of the most rows, recorded once; a step fills the first of them."""

    def __init__(self, batch: ForwardBatch, recording: Recording) -> None:
        self._batch, self._recording = batch, recording

    @classmethod
    def of(
        cls, model: Decoder, kv_caches: Sequence[Tensor], max_rows: int, max_blocks: int
    ) -> "StaticDecode | None":
        """None for a model whose arithmetic is not all by native kernels."""
        batch = _batch(model, max_rows, max_blocks)
        recording = record(lambda: model(batch, kv_caches))
        return None if recording is None else cls(batch, recording)

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether all rows decode and all want a token."""
        return batch.num_decodes == batch.token_ids.shape[0] == batch.sample_rows.shape[0]

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Logits [rows, vocab], valid until the next call: ``model(batch, kv_caches)`` to the bit."""
        mine, rows = self._batch, batch.num_decodes
        for target, source in (
            (mine.token_ids, batch.token_ids),
            (mine.positions, batch.positions),
            (mine.slots, batch.slots),
            (mine.decode_lens, batch.decode_lens),
        ):
            target[:rows] = source
        mine.decode_table[:rows, : batch.decode_table.shape[1]] = batch.decode_table
        self._recording.replay(rows)
        return self._recording.result[:rows]


def _batch(model: Decoder, rows: int, blocks: int) -> ForwardBatch:
    each, none = torch.zeros(rows, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        token_ids=each,
        positions=each.clone(),
        slots=each.clone(),
        sample_rows=each.clone(),
        num_decodes=rows,
        decode_table=torch.zeros(rows, blocks, dtype=torch.int64),
        decode_lens=torch.ones(rows, dtype=torch.int64),
        prefill_table=none,
        prefill_lens=none,
        prefill_bounds=none,
        cache_rows=_by_torch,
        plans=dict.fromkeys(model.config.windows, AttentionPlan(_by_torch, _by_torch)),
    )


def _by_torch() -> NoReturn:
    raise AssertionError("only torch's way of attention asks, and it cannot be recorded")
