"""Steps of few tokens, by one recording of the whole forward pass over tensors that stay where they are:
decodes, drafts to be checked, what a draft model lacks. Owned by ``model_runner`` and ``draft_model``, which
compute everything else layer by layer, and models that cannot be recorded.
"""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from quire_server.core.step import Step
from quire_server.layers.forward_batch import AttentionPlan, ForwardBatch
from quire_server.layers.recording import Recording, record
from quire_server.models.decoder import Decoder
from quire_server.runner.batch import Spans
from quire_server.runner.rows import Rows

_DRAFTED = 64  # tokens that there is room for, however few rows decode


class StaticDecode:
    """A batch of the most tokens, recorded once as rows of their own; a step fills the first of them."""

    def __init__(self, batch: ForwardBatch, recording: Recording, vocab_size: int) -> None:
        self._recording = recording
        self._vocab_size = vocab_size
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
        """None on a GPU, and for a model whose arithmetic is not all by native kernels."""
        if kv_caches[0].device.type != "cpu":
            return None
        batch = _batch(model, max(max_rows, _DRAFTED), max_blocks)
        recording = record(lambda: model(batch, kv_caches))
        return None if recording is None else cls(batch, recording, model.config.vocab_size)

    def takes(self, step: Step) -> bool:
        """Whether there is room for all tokens, and logits of most are wanted: it computes those of all."""
        return step.total_tokens <= min(len(self._token_ids), 2 * sum(step.samples))

    def __call__(self, spans: Spans, rows: Rows) -> Tensor:
        """Logits [sampled, vocab], valid until the next call: those of the model for ``batch.build`` of the
        same, to the bit. Token ids beyond the vocabulary, as another model may have, count as the last.
        """
        row_ids, positions = spans.tokens()
        count, lengths = len(row_ids), positions + 1
        table = rows.table(row_ids, lengths)
        np.minimum(rows.tokens[row_ids, positions], self._vocab_size - 1, out=self._token_ids[:count])
        self._positions[:count] = positions
        self._slots[:count] = rows.slots(row_ids, positions)
        self._lengths[:count] = lengths
        self._table[:count, : table.shape[1]] = table
        self._recording.replay(count)
        logits = self._recording.result[:count]
        return logits if len(spans.sampled) == count else logits[torch.from_numpy(spans.sampled)]


def _batch(model: Decoder, rows: int, blocks: int) -> ForwardBatch:
    each, none = torch.zeros(rows, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        token_ids=each,
        positions=each.clone(),
        slots=each.clone(),
        sample_rows=each.clone(),
        num_decodes=rows,
        num_queries=1,
        decode_table=torch.zeros(rows, blocks, dtype=torch.int64),
        decode_lens=torch.ones(rows, dtype=torch.int64),
        prefill_table=none,
        prefill_lens=none,
        prefill_bounds=none,
        prefill_chunks=(),
        cache_rows=_by_torch,
        plans=dict.fromkeys(model.config.windows, AttentionPlan(_by_torch, _by_torch)),
    )


def _by_torch() -> NoReturn:
    raise AssertionError("only torch's way of attention asks, and it cannot be recorded")
