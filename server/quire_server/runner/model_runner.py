"""Loads a model directory and executes Steps. The engine process owns one and calls ``run`` from one thread.

Decides nothing: which requests, which blocks and which seeds is the scheduler's business.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.step import IMPOSSIBLE, Step, StepResult, TokenLogprobs
from quire_server.models.config import ModelConfig
from quire_server.runner import (
    batch,
    device_faults,
    device_sampler,
    gpu_setup,
    out_of_memory,
    prompt_logprobs,
    sampler,
)
from quire_server.runner.cuda_device import CudaDevice
from quire_server.runner.device import Device
from quire_server.runner.device_rows import ON_DEVICE
from quire_server.runner.device_steps import Computed, DeviceSteps
from quire_server.runner.draft_model import DraftModel
from quire_server.runner.grammars import Grammars
from quire_server.runner.options import RunnerOptions
from quire_server.runner.out_of_memory import Pending
from quire_server.runner.parts import Parts, assemble
from quire_server.runner.rows import Rows
from quire_server.runner.static_decode import StaticDecode
from quire_server.runner.suspects import Suspects
from quire_server.runner.tiers import Tiers
from quire_server.text.grammar import Vocabulary
from quire_server.text.tokenizer import Tokenizer

__all__ = ["ModelRunner", "RunnerOptions", "default_block_size"]

_BLOCK_SIZE, _GPU_BLOCK_SIZE = 16, 64  # on a GPU a tile of keys is one block, whose number is read once


class ModelRunner:
    """A loaded model, its KV cache, and the rows of the running requests."""

    def __init__(self, parts: Parts, options: RunnerOptions, grammars: Grammars) -> None:
        model, kv_caches, device = parts.model, parts.kv_caches, parts.device
        self.model_config = model.config
        self.grammars = grammars
        self.num_blocks, self.max_model_len = parts.num_blocks, parts.max_model_len
        self.block_size = options.block_size
        self.dtype, self.quantization = parts.dtype, parts.quantization
        self.kv_cache_bytes = sum(cache.nbytes for cache in (*kv_caches, *parts.draft_caches))
        self._model = model
        self._kv_caches = kv_caches
        self._rows = Rows(options.max_num_seqs, parts.max_model_len, options.block_size)
        self._suspects = Suspects(self._rows, kv_caches)
        self._device = None if device is None else DeviceSteps(model, kv_caches, self._rows, device)
        self._static_decode = (
            StaticDecode.of(model, kv_caches, *self._rows.block_table.shape) if device is None else None
        )
        self._uses_graphs = device is not None and gpu_setup.uses_graphs(model, options)
        self._newest_result: Callable[[], object] = bool  # of what the device sampled; nothing yet
        self._num_drafts = options.num_speculative_tokens
        self._gpu_memory = parts.gpu_memory
        disk = parts.disk
        self.num_host_slots = parts.num_host_slots
        self.num_disk_slots = disk.num_slots if disk is not None else 0
        self._tiers = Tiers(kv_caches, self.num_host_slots, disk) if self.num_host_slots else None
        self._watermark = options.watermark
        self._draft_device: DeviceSteps | None = None
        self._draft_model: DraftModel | None = None
        if (draft := parts.draft) is not None:
            if device is not None:
                self._draft_device = DeviceSteps(draft, parts.draft_caches, self._rows, device, is_draft=True)
                self._captures_draft = gpu_setup.uses_graphs(draft, options)
            self._draft_model = DraftModel(
                draft,
                parts.draft_caches,
                self._rows,
                vocab_size=model.config.vocab_size,
                step_tokens=options.max_num_batched_tokens,
                device=self._draft_device,
            )

    @classmethod
    def load(
        cls, model_dir: Path, options: RunnerOptions, on_progress: Callable[[int, int], None]
    ) -> "ModelRunner":
        """Read, check and place the model; on_progress(loaded bytes, total bytes) between chunks."""
        with device_faults.named("while the model is loaded"):
            parts = assemble(model_dir, options, on_progress, _device(options.device))
            config = parts.model.config
            return cls(parts, options, Grammars(lambda: _vocabulary(model_dir, config)))

    @property
    def gpu_memory(self) -> Mapping[str, int]:
        """Bytes of the GPU by what takes them; nothing on the host."""
        if self._device is None:
            return {}
        return {**self._gpu_memory, "kv": self.kv_cache_bytes, "graphs": self._graph_bytes}

    @property
    def _graph_bytes(self) -> int:
        return sum(each.graph_bytes for each in (self._device, self._draft_device) if each is not None)

    @property
    def streamed_bytes(self) -> int:
        """Of weights that each step brings from the host's memory."""
        return self._model.streamed_bytes

    def capture(self, on_progress: Callable[[int, int], None]) -> None:
        """On a device: capture decode steps before the first one; on_progress(graphs, of how many)."""
        if self._device is not None and self._uses_graphs:
            with device_faults.named("while graphs are captured"):
                self._device.capture(self._num_drafts, on_progress)
        if self._draft_device is not None and self._captures_draft:
            with device_faults.named("while graphs are captured"):
                self._draft_device.capture(0, on_progress)

    def close(self) -> None:
        """Give back what the process's end would give back, too: the disk tier's space."""
        if self._tiers is not None:
            self._tiers.close()

    @property
    def is_asynchronous(self) -> bool:
        """Whether ``launch`` returns before the step is computed."""
        return self._device is not None

    def run(self, step: Step) -> StepResult:
        """One forward pass, and the tokens of each row that wants some."""
        return self.launch(step)()

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        """Begin one forward pass; drafts that are wished for come first. Results are to be asked for in the
        order of the launches, and at most one step may be launched while another one's result is not there.
        """
        with device_faults.named():
            return self._launch(step)

    def _launch(self, step: Step) -> Pending:
        self._rows.apply(step)
        if self._device is not None:
            self._device.apply(step)
        assert step.copies is None or self._tiers is not None, (
            "the scheduler has tiers and the runner has none"
        )
        copied = self._tiers.copy(step) if self._tiers is not None else None
        self._suspects.cleanse(step)
        if self._draft_model is None:
            wait = out_of_memory.launch(step, self._start)
            return wait if copied is None else lambda: dataclasses.replace(wait(), copied=copied)
        self._draft_model.follow(step)
        drafted, seconds = self._draft_model.propose(step, lambda *entries: self._choose(*entries)[0])
        result = out_of_memory.launch(drafted, self._start)()
        result = dataclasses.replace(result, drafts=drafted.drafts, draft_seconds=seconds, copied=copied)
        return lambda: result

    def _start(self, step: Step) -> Pending:
        rows, spans = self._rows, batch.Spans.of(step)
        computed = self._forward(step, spans)
        row_ids, lengths = spans.sampled_rows, spans.sampled_lengths
        if not row_ids.size:
            result = StepResult(step.step_id, (), prompt_logprobs=computed.told)
            return lambda: result
        if self._device is None or not device_sampler.can_choose(rows, row_ids, lengths):
            result = self._sampled(step, spans, computed)
            return lambda: result
        forbidden: dict[int, str] = {}
        if rows.has_grammar[row_ids].any():
            self._newest_result()  # a grammar follows tokens, not places for them
            eos_ids = self.model_config.eos_token_ids
            forbidden = self.grammars.constrain(
                computed.logits, rows, row_ids, lengths, eos_ids, self._device.upload
            )
        wait = self._device.sample(computed, spans)
        if not step.drafts:  # which are compared with what comes in their place, and not computed ahead
            self._write(row_ids, lengths, ON_DEVICE)
        epochs, told = rows.epoch[row_ids], computed.told

        @cache
        def result_of() -> StepResult:
            with device_faults.named():
                tokens, failed = device_sampler.read(wait())
            # Whoever has a row by now must not get what was computed for the one before.
            is_same = rows.epoch[row_ids] == epochs
            failed = {index: why for index, why in (forbidden | failed).items() if is_same[index]}
            failures = self._failures(failed, row_ids, lengths, tokens)
            self._distrust(failures)
            self._write(row_ids[is_same], lengths[is_same], tokens[is_same])
            return StepResult(step.step_id, tuple(tokens.tolist()), {}, failures, prompt_logprobs=told)

        self._newest_result = result_of
        return result_of

    def _sampled(self, step: Step, spans: batch.Spans, computed: Computed) -> StepResult:
        """Sampling on the host, which has a way for everything that can be asked for."""
        rows, row_ids = self._rows, spans.sampled_rows
        self._newest_result()  # contexts are looked at
        logits = computed.logits.cpu()
        wants_logprobs = bool((rows.num_logprobs[row_ids] >= 0).any())
        raw = logits.clone() if wants_logprobs else logits  # the sampler changes them in place
        tokens, failures = self._choose(logits, row_ids, spans.sampled_lengths)
        self._distrust(failures)
        found = sampler.logprobs(raw, tokens, rows.num_logprobs[row_ids]) if wants_logprobs else {}
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        for index, one in found.items():
            row = int(row_ids[index])
            logprobs[row] = (*logprobs.get(row, ()), one)
        return StepResult(
            step.step_id, tuple(tokens.tolist()), logprobs, failures, prompt_logprobs=computed.told
        )

    def _forward(self, step: Step, spans: batch.Spans) -> Computed:
        """Logits float32 of the positions to sample, and what was asked of the prompts."""
        if self._device is not None:
            return self._device.compute(step, spans)
        rows, config = self._rows, self.model_config
        reports = len(spans.sampled) < step.total_tokens and bool(
            (rows.num_prompt_logprobs[spans.rows] >= 0).any()
        )
        if self._static_decode is not None and not reports and self._static_decode.takes(step):
            return Computed(self._static_decode(spans, rows).float(), None, {})
        forward_batch = batch.build(step, spans, rows, config.num_kv_heads, config.windows)
        states = self._model.states(forward_batch, self._kv_caches)
        told = prompt_logprobs.compute(self._model, states, spans, rows) if reports else {}
        return Computed(self._model.logits(states, forward_batch.sample_rows).float(), None, told)

    def _choose(
        self, logits: Tensor, row_ids: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], dict[int, str]]:
        """(tokens, failures by row): sample at each position, and write the tokens behind their contexts.
        Drafts are sampled by the same rule, so that the two agree wherever the models do.
        """
        rows, eos_ids = self._rows, self.model_config.eos_token_ids
        forbidden = self.grammars.constrain(logits, rows, row_ids, lengths, eos_ids)
        tokens, failed = sampler.sample(logits, rows, row_ids, lengths, eos_ids, self._watermark)
        failures = self._failures(forbidden | failed, row_ids, lengths, tokens)
        self._write(row_ids, lengths, tokens)
        return tokens, failures

    def _failures(
        self,
        found: dict[int, str],
        row_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> dict[int, str]:
        """By row, those found at positions that are going to be a part of the answer."""
        eos_ids = self.model_config.eos_token_ids
        failures = {
            int(row_ids[index]): why
            for index, why in found.items()
            if why == sampler.NOT_FINITE or self._rows.holds(index, row_ids, lengths, tokens, eos_ids)
        }
        return failures

    def _distrust(self, failures: dict[int, str]) -> None:
        """What these rows have in the cache may be no numbers."""
        self._suspects.add(row for row, why in failures.items() if why not in IMPOSSIBLE)

    def _write(
        self, row_ids: NDArray[np.int64], lengths: NDArray[np.int64], tokens: NDArray[np.int64] | int
    ) -> None:
        """Tokens behind their contexts, as far as there is room for one."""
        inside = lengths < self.max_model_len
        given = tokens if isinstance(tokens, int) else tokens[inside]
        self._rows.tokens[row_ids[inside], lengths[inside]] = given


def _vocabulary(model_dir: Path, config: ModelConfig) -> Vocabulary:
    return Vocabulary.of(Tokenizer.load(model_dir), config.eos_token_ids, config.vocab_size)


def default_block_size(device: str) -> int:
    """Of ``--device``, in tokens."""
    return _GPU_BLOCK_SIZE if _is_gpu(device) else _BLOCK_SIZE


def _device(name: str) -> Device | None:
    return CudaDevice() if _is_gpu(name) else None


def _is_gpu(name: str) -> bool:
    """What ``--device`` names; auto: a GPU where there is one."""
    return name == "cuda" or (name == "auto" and CudaDevice.is_there())
