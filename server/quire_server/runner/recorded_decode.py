"""Small steps on a CPU: one recording of the forward pass over fixed tensors, replayed for decodes, for
drafts to be verified, and for the tokens that a draft model lacks. Like a CUDA graph, a replay saves the
per-layer work of Python and torch. Larger steps, and models that cannot be recorded, are computed layer by
layer.
"""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.step import Step
from quire_server.layers.forward_batch import AttentionPlan, ForwardBatch
from quire_server.layers.lora import BatchAdapters
from quire_server.layers.ops import Recording, record
from quire_server.models.decoder import Decoder
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.input_batch import InputBatch

_DRAFTED = 64  # at least this many tokens fit, for drafts of few rows


class _Adapted(NamedTuple):
    """The recording of the same with LoRA adapters, for steps of which a token has one."""

    slots: NDArray[np.int64]
    recording: Recording


class RecordedDecode:
    """The recording of a batch of the maximum size; a step fills its leading rows. ``largest``: the recording
    of what finds the largest of its logits, None where that is not by native kernels alone.
    """

    def __init__(
        self,
        model: Decoder,
        batch: ForwardBatch,
        recording: Recording,
        largest: Recording | None,
        adapted: "_Adapted | None",
    ) -> None:
        self._model, self._adapted = model, adapted
        self._recording, self._largest = recording, largest
        self._prepared: tuple[StepLayout, int] | None = None  # with the version of its block tables
        self._vocab_size = model.config.vocab_size
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
        cls,
        model: Decoder,
        kv_caches: Sequence[Tensor],
        max_rows: int,
        max_blocks: int,
        adapters: BatchAdapters | None = None,
    ) -> "RecordedDecode | None":
        """Record the model, or return None on a GPU and for a model that uses anything but native kernels."""
        if kv_caches[0].device.type != "cpu":
            return None
        batch = _batch(model, max(max_rows, _DRAFTED), max_blocks)

        def compute() -> Tensor:
            return model.own_logits(model.states(batch, kv_caches), batch.sample_rows)

        recording, adapted = record(compute), None
        if recording is None:
            return None
        if adapters is not None:
            slots = adapters.on_host = torch.full_like(batch.token_ids, -1)
            with_adapters = record(compute)
            adapters.on_host = None
            if with_adapters is None:
                return None  # a part of a layer is no multiple of 16
            adapted = _Adapted(slots.numpy(), with_adapters)
        own = recording.result
        largest = record(lambda: model.whole_logits(own, only_largest=True))
        return cls(model, batch, recording, largest, adapted)

    def takes(self, step: Step) -> bool:
        """Whether the step fits, and most of its tokens are sampled: a replay computes the logits of all."""
        return step.total_tokens <= min(len(self._token_ids), 2 * sum(step.samples))

    def prepare(self, layout: StepLayout, input_batch: InputBatch) -> None:
        """Fill in what a step needs beside its tokens, maybe before they are known. It is filled in again if
        another step comes, or a block table changes.
        """
        row_ids, positions = layout.tokens()
        count, lengths = len(row_ids), positions + 1
        table = input_batch.table(row_ids, lengths)
        self._positions[:count] = positions
        self._slots[:count] = input_batch.slots(row_ids, positions)
        self._lengths[:count] = lengths
        self._table[:count, : table.shape[1]] = table
        self._prepared = layout, input_batch.table_version

    def __call__(self, layout: StepLayout, input_batch: InputBatch, *, only_largest: bool = False) -> Tensor:
        """Logits [sampled, vocab], valid until the next call and bit-identical to the model's for the same
        step; several ranks exchange those of the sampled positions after the replay. ``only_largest``: as
        ``parallel.argmax``. Token ids beyond the vocabulary, which drafts for another model may contain, are
        clamped to the last id.
        """
        if self._prepared is None or not (
            self._prepared[0] is layout and self._prepared[1] == input_batch.table_version
        ):
            self.prepare(layout, input_batch)
        row_ids, positions = layout.tokens()
        count = len(row_ids)
        np.minimum(input_batch.tokens[row_ids, positions], self._vocab_size - 1, out=self._token_ids[:count])
        recording = self._recording
        if self._adapted is not None and ((slots := input_batch.adapter_slot[row_ids]) >= 0).any():
            self._adapted.slots[:count] = slots
            recording = self._adapted.recording
        recording.replay(count)
        has_all = len(layout.sampled) == count
        if only_largest and has_all and recording is self._recording and self._largest is not None:
            self._largest.replay(count)
            return self._largest.result[:count]
        own = recording.result[:count]
        if not has_all:
            own = own[torch.from_numpy(layout.sampled)]
        return self._model.whole_logits(own, only_largest=only_largest)


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
    raise AssertionError("attention by torch operations needs a plan, and cannot be recorded")
