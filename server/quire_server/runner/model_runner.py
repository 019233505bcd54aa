"""Loads a model directory and executes Steps. The engine process owns one and calls ``run`` from one thread.

Decides nothing: which requests, which blocks and which seeds is the scheduler's business.
"""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.errors import ConfigError
from quire_server.core.step import IMPOSSIBLE, Step, StepResult, TokenLogprobs
from quire_server.layers.int8_linear import has_native_kernels
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Decoder
from quire_server.runner import batch, drafts, kv_cache, out_of_memory, prompt_logprobs, sampler
from quire_server.runner.checkpoint import Checkpoint
from quire_server.runner.disk import Disk
from quire_server.runner.draft_model import DraftModel
from quire_server.runner.grammars import Grammars
from quire_server.runner.options import RunnerOptions
from quire_server.runner.rows import Rows
from quire_server.runner.static_decode import StaticDecode
from quire_server.runner.tiers import Tiers
from quire_server.text.grammar import Vocabulary
from quire_server.text.tokenizer import Tokenizer

__all__ = ["ModelRunner", "RunnerOptions"]

logger = logging.getLogger(__name__)


class ModelRunner:
    """A loaded model, its KV cache, and the rows of the running requests."""

    def __init__(
        self,
        model: Decoder,
        kv_caches: tuple[Tensor, ...],
        options: RunnerOptions,
        *,
        grammars: Grammars,
        num_blocks: int,
        max_model_len: int,
        dtype: str,
        quantization: str,
        num_host_slots: int = 0,
        disk: Disk | None = None,
        draft: Decoder | None = None,
        draft_caches: tuple[Tensor, ...] = (),
    ) -> None:
        self.model_config = model.config
        self.grammars = grammars
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.quantization = quantization
        self.kv_cache_bytes = sum(cache.nbytes for cache in (*kv_caches, *draft_caches))
        self._model = model
        self._kv_caches = kv_caches
        self._rows = Rows(options.max_num_seqs, max_model_len, options.block_size)
        self._static_decode = StaticDecode.of(model, kv_caches, *self._rows.block_table.shape)
        self.num_host_slots = num_host_slots
        self.num_disk_slots = disk.num_slots if disk is not None else 0
        self._tiers = Tiers(kv_caches, num_host_slots, disk) if num_host_slots else None
        self._watermark = options.watermark
        self._suspect: set[int] = set()  # blocks of failed rows, not yet zeroed
        self._draft_model = (
            None
            if draft is None
            else DraftModel(
                draft,
                draft_caches,
                self._rows,
                vocab_size=model.config.vocab_size,
                step_tokens=options.max_num_batched_tokens,
            )
        )

    @classmethod
    def load(
        cls, model_dir: Path, options: RunnerOptions, on_progress: Callable[[int, int], None]
    ) -> "ModelRunner":
        """Read, check and place the model; on_progress(loaded bytes, total bytes) between chunks."""
        device = _device(options.device)
        found = Checkpoint.open(model_dir, dtype=options.dtype, quantization_name=options.quantization)
        draft = drafts.open_draft(found, options)
        config = found.config
        # Settings that cannot work fail before the long part; what is left after it decides.
        stored = kv_cache.storage_dtype(options.kv_cache_dtype, found.dtype)
        block_bytes = kv_cache.block_bytes(config, options.block_size, stored)
        if draft is not None:
            block_bytes += draft.block_bytes
        _, longest = kv_cache.plan(config, options, block_bytes)
        num_host_slots = kv_cache.offload_slots(
            options.kv_offload_host_bytes, "host", config, options, stored
        )
        disk = _disk(config, options, stored)
        total = found.size + (draft.checkpoint.size if draft is not None else 0)
        model = found.read(max_len=longest, device=device, on_progress=lambda n, _: on_progress(n, total))
        draft_model = None
        if draft is not None:
            draft_model = draft.checkpoint.read(
                max_len=longest,
                device=device,
                on_progress=lambda n, _: on_progress(found.size + n, total),
            )
        num_blocks, max_model_len = kv_cache.plan(config, options, block_bytes)
        caches = kv_cache.allocate(config, num_blocks, options.block_size, dtype=stored, device=device)
        logger.info(
            "model loaded",
            extra={
                "dtype": found.dtype_name,
                "quantization": found.quantization,
                "draft_model": "none" if draft is None else draft.checkpoint.arithmetic,
                "threads": torch.get_num_threads(),
                "native_kernels": has_native_kernels(),
            },
        )
        return cls(
            model,
            caches,
            options,
            grammars=Grammars(lambda: _vocabulary(model_dir, config)),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            dtype=found.dtype_name,
            quantization=found.quantization,
            num_host_slots=num_host_slots,
            disk=disk,
            draft=draft_model,
            draft_caches=() if draft is None else draft.allocate(num_blocks, device),
        )

    def close(self) -> None:
        """Give back what the process's end would give back, too: the disk tier's space."""
        if self._tiers is not None:
            self._tiers.close()

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult:
        """One forward pass, and the tokens of each row that wants some; drafts that are wished for come
        first.
        """
        self._rows.apply(step)
        assert step.copies is None or self._tiers is not None, (
            "the scheduler has tiers and the runner has none"
        )
        copied = self._tiers.copy(step) if self._tiers is not None else None
        self._cleanse(step)
        if self._draft_model is None:
            result = out_of_memory.compute(step, self._compute)
        else:
            self._draft_model.follow(step)
            drafted, seconds = self._draft_model.propose(step, lambda *entries: self._choose(*entries)[0])
            result = out_of_memory.compute(drafted, self._compute)
            result = dataclasses.replace(result, drafts=drafted.drafts, draft_seconds=seconds)
        return result if copied is None else dataclasses.replace(result, copied=copied)

    def _compute(self, step: Step) -> StepResult:
        rows = self._rows
        spans = batch.Spans.of(step)
        logits, told = self._forward(step, spans)
        row_ids, lengths = spans.sampled_rows, spans.sampled_lengths
        if not row_ids.size:
            return StepResult(step.step_id, (), prompt_logprobs=told)
        wants_logprobs = bool((rows.num_logprobs[row_ids] >= 0).any())
        raw = logits.clone() if wants_logprobs else logits  # the sampler changes them in place
        tokens, failures = self._choose(logits, row_ids, lengths)
        for row in (row for row, why in failures.items() if why not in IMPOSSIBLE):
            self._suspect.update(rows.block_table[row, : rows.num_blocks[row]].tolist())
        found = sampler.logprobs(raw, tokens, rows.num_logprobs[row_ids]) if wants_logprobs else {}
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        for index, one in found.items():
            row = int(row_ids[index])
            logprobs[row] = (*logprobs.get(row, ()), one)
        return StepResult(step.step_id, tuple(tokens.tolist()), logprobs, failures, prompt_logprobs=told)

    def _forward(self, step: Step, spans: batch.Spans) -> tuple[Tensor, dict[int, tuple[TokenLogprobs, ...]]]:
        """Logits float32 of the positions to sample, and what was asked of the prompts, by row."""
        rows, config = self._rows, self.model_config
        reports = len(spans.sampled) < step.total_tokens and bool(
            (rows.num_prompt_logprobs[spans.rows] >= 0).any()
        )
        if self._static_decode is not None and not reports and self._static_decode.takes(step):
            return self._static_decode(spans, rows).float(), {}
        forward_batch = batch.build(step, spans, rows, config.num_kv_heads, config.windows)
        states = self._model.states(forward_batch, self._kv_caches)
        told = prompt_logprobs.compute(self._model, states, spans, rows) if reports else {}
        return self._model.logits(states, forward_batch.sample_rows).float(), told

    def _choose(
        self, logits: Tensor, row_ids: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], dict[int, str]]:
        """(tokens, failures by row): sample at each position, and write the tokens behind their contexts.
        Drafts are sampled by the same rule, so that the two agree wherever the models do.
        """
        rows, eos_ids = self._rows, self.model_config.eos_token_ids
        forbidden = self.grammars.constrain(logits, rows, row_ids, lengths, eos_ids)
        tokens, failed = sampler.sample(logits, rows, row_ids, lengths, eos_ids, self._watermark)
        failures = {
            int(row_ids[index]): why
            for index, why in (forbidden | failed).items()
            if why == sampler.NOT_FINITE or rows.holds(index, row_ids, lengths, tokens, eos_ids)
        }
        inside = lengths < self.max_model_len
        rows.tokens[row_ids[inside], lengths[inside]] = tokens[inside]
        return tokens, failures

    def _cleanse(self, step: Step) -> None:
        """Zero the blocks of failed rows when they come to a new owner, not before: some may be shared.

        What is not a number must not wait behind a sequence's end: attention masks it, but still multiplies.
        """
        if not self._suspect:
            return
        starts = dict(zip(step.rows, step.starts, strict=True))
        size = self._rows.block_size
        handed = {block_id for _, block_id in step.grown}
        for row in step.started:
            cached = -(-starts.get(row.row, len(row.token_ids)) // size)
            handed.update(row.block_ids[cached:])
        dirty = sorted(handed & self._suspect)
        if dirty:
            for cache in self._kv_caches:
                cache[:, torch.tensor(dirty)] = 0
            self._suspect.difference_update(dirty)


def _vocabulary(model_dir: Path, config: ModelConfig) -> Vocabulary:
    return Vocabulary.of(Tokenizer.load(model_dir), config.eos_token_ids, config.vocab_size)


def _disk(config: ModelConfig, options: RunnerOptions, dtype: torch.dtype) -> Disk | None:
    if (path := options.kv_offload_disk_path) is None:
        return None
    num_slots = kv_cache.offload_slots(options.kv_offload_disk_bytes, "disk", config, options, dtype)
    try:
        return Disk(path, num_slots, kv_cache.block_bytes(config, options.block_size, dtype))
    except OSError as error:
        raise ConfigError(
            f"kv-offload-disk-path {path} cannot be written to ({error.strerror}): give another directory."
        ) from None


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu"):
        raise ConfigError(f"Device {name!r} is not supported by this version; supported: auto, cpu.")
    return torch.device("cpu")
