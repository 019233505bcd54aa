"""Steps on a device that computes by itself. Owned by ``model_runner``, which samples on the host what cannot
be sampled here.

Decodes are replays of captured graphs wherever there is one of the size; steps with prompts in them are
launched kernel by kernel, which costs little beside what they compute. Nothing in here waits for the device.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core import graph_buckets
from quire_server.core.step import Step, TokenLogprobs
from quire_server.layers.forward_batch import ForwardBatch
from quire_server.models.decoder import Decoder
from quire_server.runner import batch, device_sampler, prompt_logprobs
from quire_server.runner.cuda_graphs import CudaGraphs
from quire_server.runner.device import Device, Outputs
from quire_server.runner.device_rows import DeviceRows
from quire_server.runner.rows import Rows


class Computed(NamedTuple):
    """What a forward pass left on the device, until the next one."""

    logits: Tensor  # f32 [S, vocab]
    tokens: Tensor | None  # i64 [S], if it sampled by temperature alone
    told: dict[int, tuple[TokenLogprobs, ...]]  # of prompts, by row, where asked for


class DeviceSteps:
    """A model on a device, and its part of the rows.

    ``is_draft``: their tokens may be beyond its vocabulary, and it tells nothing of prompts.
    """

    def __init__(
        self,
        model: Decoder,
        kv_caches: tuple[Tensor, ...],
        rows: Rows,
        device: Device,
        *,
        is_draft: bool = False,
    ) -> None:
        self._model, self._kv_caches, self._rows, self._device = model, kv_caches, rows, device
        self._is_draft = is_draft
        self._state = DeviceRows(rows, device)
        self._graphs = CudaGraphs(device)
        self.graph_bytes = 0  # that captures took

    @torch.inference_mode()
    def capture(self, num_drafts: int, on_progress: Callable[[int, int], None]) -> None:
        """Capture decode steps of all shapes that the rows can need, and of up to so many drafts each."""
        shapes = graph_buckets.shapes(len(self._rows.tokens), num_drafts)
        before = self._device.memory().reserved
        self._graphs.capture(shapes, self._state.padding, self._decode, on_progress)
        self.graph_bytes = self._device.memory().reserved - before

    def apply(self, step: Step) -> None:
        """Differences, after the host's rows took them in."""
        self._state.apply(step)

    def compute(self, step: Step, spans: batch.Spans) -> Computed:
        """The forward pass; of decodes, with the sampling that a graph has in it."""
        if graph_buckets.is_uniform(step):
            return self._decoded(step, spans)
        config = self._model.config
        built = batch.build(step, spans, self._rows, config.num_kv_heads, config.windows)
        token_rows = self._device.upload(np.repeat(spans.rows, spans.ends - spans.starts))
        uploaded = self._uploaded(built)
        known = self._state.known(uploaded.token_ids, token_rows)
        uploaded = dataclasses.replace(uploaded, token_ids=self._embeddable(known))
        states = self._model.states(uploaded, self._kv_caches)
        reports = not self._is_draft and bool((self._rows.num_prompt_logprobs[spans.rows] >= 0).any())
        told = prompt_logprobs.compute(self._model, states, spans, self._rows) if reports else {}
        return Computed(self._model.logits(states, uploaded.sample_rows).float(), None, told)

    def upload(self, array: NDArray[Any]) -> Tensor:
        """The device's."""
        return self._device.upload(array)

    def sample(self, computed: Computed, spans: batch.Spans) -> Callable[[], NDArray[np.int64]]:
        """Tokens of the sampled positions, or in place of one why there is none; waits when it is called."""
        tokens, row_ids, ends = computed.tokens, spans.sampled_rows, spans.sampled_lengths
        if tokens is None or device_sampler.wants_more(self._rows, row_ids):
            upload, logits = self._device.upload, computed.logits
            device_sampler.penalise(logits, self._state, self._rows, row_ids, ends, upload)
            index, lengths = upload(np.stack((row_ids, ends)))
            cuts = device_sampler.wants_cuts(self._rows, row_ids)
            tokens = device_sampler.choose(logits, self._state, index, lengths, cuts=cuts)
        return self._device.download(tokens)

    def _decoded(self, step: Step, spans: batch.Spans) -> Computed:
        """Every row's last tokens: together, or, where that is fewer with the padding, one by one."""
        captured = self._graphs.shape_for(step.num_tokens)
        shape = captured or graph_buckets.eager_shape(step.num_tokens)
        rows, starts, counts = spans.rows, spans.starts, spans.ends - spans.starts
        if shape[1] == 1:
            rows, starts = spans.sampled_rows, spans.sampled_lengths - 1
            counts = np.ones_like(rows)
        entries, is_there = self._state.entries(rows, starts, counts, shape)
        given = self._device.upload(entries)
        logits, tokens = self._decode(given) if captured is None else self._graphs.replay(given)
        count = len(spans.sampled)
        if is_there.reshape(-1)[:count].all():
            return Computed(logits[:count], tokens[:count], {})
        wanted = self._device.upload(np.flatnonzero(is_there))
        return Computed(logits[wanted], tokens[wanted], {})

    def _decode(self, entries: Tensor) -> Outputs:
        forward_batch = self._state.batch(entries, self._model.config)
        given = self._embeddable(forward_batch.token_ids)
        forward_batch = dataclasses.replace(forward_batch, token_ids=given)
        logits = self._model(forward_batch, self._kv_caches).float()
        rows, starts, _ = entries.flatten(1)
        return logits, device_sampler.choose(logits, self._state, rows, starts + 1, cuts=False)

    def _embeddable(self, token_ids: Tensor) -> Tensor:
        return token_ids.clamp(max=self._model.config.vocab_size - 1) if self._is_draft else token_ids

    def _uploaded(self, built: ForwardBatch) -> ForwardBatch:
        tensors: dict[str, Any] = {
            field.name: self._device.upload(value.numpy())
            for field in dataclasses.fields(built)
            if isinstance(value := getattr(built, field.name), Tensor)
        }
        return dataclasses.replace(built, **tensors)
