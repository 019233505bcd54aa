"""Loads a model directory and executes Steps. The engine process owns one and calls ``run`` from one thread.

Decides nothing: which requests, which blocks and which seeds is the scheduler's business.
"""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire_server.core.errors import ConfigError
from quire_server.core.model_files import ModelFiles
from quire_server.core.step import Step, StepResult, TokenLogprobs
from quire_server.layers.int8_linear import has_native_kernels
from quire_server.models import registry, weights
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Decoder
from quire_server.runner import batch, kv_cache, out_of_memory, prompt_logprobs, quantization, sampler
from quire_server.runner.disk import Disk
from quire_server.runner.options import RunnerOptions
from quire_server.runner.rows import Rows
from quire_server.runner.static_decode import StaticDecode
from quire_server.runner.tiers import Tiers

__all__ = ["ModelRunner", "RunnerOptions"]

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelRunner:
    """A loaded model, its KV cache, and the rows of the running requests."""

    def __init__(
        self,
        model: Decoder,
        kv_caches: tuple[Tensor, ...],
        options: RunnerOptions,
        *,
        num_blocks: int,
        max_model_len: int,
        dtype: str,
        quantization: str,
        num_host_slots: int = 0,
        disk: Disk | None = None,
    ) -> None:
        self.model_config = model.config
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.quantization = quantization
        self.kv_cache_bytes = sum(cache.nbytes for cache in kv_caches)
        self._model = model
        self._kv_caches = kv_caches
        self._rows = Rows(options.max_num_seqs, max_model_len, options.block_size)
        self._static_decode = StaticDecode.of(model, kv_caches, *self._rows.block_table.shape)
        self.num_host_slots = num_host_slots
        self.num_disk_slots = disk.num_slots if disk is not None else 0
        self._tiers = Tiers(kv_caches, num_host_slots, disk) if num_host_slots else None
        self._watermark = options.watermark
        self._suspect: set[int] = set()  # blocks of failed rows, not yet zeroed

    @classmethod
    def load(
        cls, model_dir: Path, options: RunnerOptions, on_progress: Callable[[int, int], None]
    ) -> "ModelRunner":
        """Read, check and place the model; on_progress(loaded bytes, total bytes) between chunks."""
        files = ModelFiles.open(model_dir)
        config = registry.load(files)
        device, dtype_name = _device(options.device), _dtype_name(options.dtype, config.dtype)
        dtype = _DTYPES[dtype_name]
        chosen, linear = quantization.choose(
            options.quantization,
            checkpoint=config.quantization,
            dtype_is_auto=options.dtype == "auto",
            dtype=dtype_name,
        )
        tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
        shards = weights.inspect(files, registry.tensors(config, linear), tied)
        # Settings that cannot work fail before the long part; what is left after it decides.
        stored = kv_cache.storage_dtype(options.kv_cache_dtype, dtype)
        _, longest = kv_cache.plan(config, options, stored)
        num_host_slots = kv_cache.offload_slots(
            options.kv_offload_host_bytes, "host", config, options, stored
        )
        disk = _disk(config, options, stored)
        model = registry.build(config, max_len=longest, dtype=dtype, device=device, linear=linear)
        weights.read(files, shards, model.targets(), on_progress)
        model.finish()
        num_blocks, max_model_len = kv_cache.plan(config, options, stored)
        caches = kv_cache.allocate(config, num_blocks, options.block_size, dtype=stored, device=device)
        logger.info(
            "model loaded",
            extra={
                "dtype": dtype_name,
                "quantization": chosen,
                "threads": torch.get_num_threads(),
                "native_kernels": has_native_kernels(),
            },
        )
        return cls(
            model,
            caches,
            options,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            dtype=dtype_name,
            quantization=chosen,
            num_host_slots=num_host_slots,
            disk=disk,
        )

    def close(self) -> None:
        """Give back what the process's end would give back, too: the disk tier's space."""
        if self._tiers is not None:
            self._tiers.close()

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult:
        """One forward pass, and a token for each row that wants one."""
        self._rows.apply(step)
        assert step.copies is None or self._tiers is not None, (
            "the scheduler has tiers and the runner has none"
        )
        copied = self._tiers.copy(step) if self._tiers is not None else None
        self._cleanse(step)
        result = out_of_memory.compute(step, self._compute) if step.rows else StepResult(step.step_id, ())
        return result if copied is None else dataclasses.replace(result, copied=copied)

    def _compute(self, step: Step) -> StepResult:
        rows = self._rows
        spans = batch.Spans.of(step)
        logits, told = self._forward(step, spans)
        is_sampled = np.array(step.samples, bool)
        row_ids, lengths = spans.rows[is_sampled], spans.ends[is_sampled]
        if not row_ids.size:
            return StepResult(step.step_id, (), prompt_logprobs=told)
        wants_logprobs = bool((rows.num_logprobs[row_ids] >= 0).any())
        raw = logits.clone() if wants_logprobs else logits  # the sampler changes them in place
        tokens, failed = sampler.sample(
            logits, rows, row_ids, lengths, self.model_config.eos_token_ids, self._watermark
        )
        inside = lengths < self.max_model_len
        rows.tokens[row_ids[inside], lengths[inside]] = tokens[inside]
        failures = {int(row_ids[index]): why for index, why in failed.items()}
        for row in failures:
            self._suspect.update(rows.block_table[row, : rows.num_blocks[row]].tolist())
        found = sampler.logprobs(raw, tokens, rows.num_logprobs[row_ids]) if wants_logprobs else {}
        logprobs = {int(row_ids[index]): one for index, one in found.items()}
        return StepResult(step.step_id, tuple(tokens.tolist()), logprobs, failures, prompt_logprobs=told)

    def _forward(self, step: Step, spans: batch.Spans) -> tuple[Tensor, dict[int, tuple[TokenLogprobs, ...]]]:
        """Logits float32 of the positions to sample, and what was asked of the prompts, by row."""
        if self._static_decode is not None and self._static_decode.takes(step):
            return self._static_decode(spans, self._rows).float(), {}
        rows, config = self._rows, self.model_config
        forward_batch = batch.build(step, spans, rows, config.num_kv_heads, config.windows)
        states = self._model.states(forward_batch, self._kv_caches)
        reports = bool((rows.num_prompt_logprobs[spans.rows] >= 0).any())
        told = prompt_logprobs.compute(self._model, states, spans, rows) if reports else {}
        return self._model.logits(states, forward_batch.sample_rows).float(), told

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


def _dtype_name(wanted: str, stored: str) -> str:
    """auto: the checkpoint's, where the CPU computes in it; float32 elsewhere."""
    if wanted == "auto":
        has_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return "bfloat16" if stored != "float32" and has_bf16 else "float32"
    if wanted not in _DTYPES:
        raise ConfigError(f"dtype {wanted!r} is not supported; supported: auto, {', '.join(_DTYPES)}.")
    return wanted
