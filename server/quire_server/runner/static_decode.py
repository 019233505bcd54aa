"""Steps in which every row decodes, by one recording of the whole forward pass over tensors that stay where
they are. Owned by ``model_runner``, which computes everything else, and models that cannot be recorded.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from quire_server.core.step import Step
from quire_server.layers.forward_batch import AttentionPlan, ForwardBatch
from quire_server.layers.recording import Recording, record
from quire_server.models.decoder import Decoder
from quire_server.runner.batch import Spans
from quire_server.runner.rows import Rows


class StaticDecode:
    """A batch of the most rows, recorded once; a step fills the first of them."""

    def __init__(self, batch: ForwardBatch, recording: Recording) -> None:
        self._recording = recording
        self._token_ids, self._positions, self._slots, self._lengths, self._table = (
            tensor.numpy()
            for tensor in (
                batch.token_ids,
                batch.positions,
                batch.slots,
                batch.decode_lens,
                batch.decode_table,
            )
        )

    @classmethod
    def of(
        cls, model: Decoder, kv_caches: Sequence[Tensor], max_rows: int, max_blocks: int
    ) -> "StaticDecode | None":
        """None for a model whose arithmetic is not all by native kernels."""
        batch = _batch(model, max_rows, max_blocks)
        recording = record(lambda: model(batch, kv_caches))
        return None if recording is None else cls(batch, recording)

    def takes(self, step: Step) -> bool:
        """Whether all rows decode and all want a token."""
        return step.total_tokens == len(step.rows) and all(step.samples)

    def __call__(self, spans: Spans, rows: Rows) -> Tensor:
        """Logits [rows, vocab], valid until the next call: those of the model for ``batch.build`` of the
        same, to the bit.
        """
        count, table = len(spans.rows), rows.table(spans.rows, spans.ends)
        self._token_ids[:count] = rows.tokens[spans.rows, spans.starts]
        self._positions[:count] = spans.starts
        self._slots[:count] = rows.slots(spans.rows, spans.starts)
        self._lengths[:count] = spans.ends
        self._table[:count, : table.shape[1]] = table
        self._recording.replay(count)
        return self._recording.result[:count]


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
