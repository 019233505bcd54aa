"""ModelRunner: loads a model directory and executes Steps. The engine process owns one and calls it from one
thread. The scheduler decides which requests run, with which blocks and seeds.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.step import (
    NOT_FINITE,
    UNSATISFIABLE,
    Step,
    StepResult,
    TokenLogprobs,
)
from quire_server.core.topology import Topology
from quire_server.errors import ConfigError
from quire_server.models.config import ModelConfig
from quire_server.runner import oom_retry, sampler
from quire_server.runner.adapters import Adapters
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.config import RunnerConfig
from quire_server.runner.draft_model import DraftModel
from quire_server.runner.gpu import logits_edits, memory_profile
from quire_server.runner.gpu import sampler as gpu_sampler
from quire_server.runner.gpu.cuda_device import CudaDevice
from quire_server.runner.gpu.device import Device, translate_device_errors
from quire_server.runner.gpu.executor import ForwardOutput, GpuExecutor
from quire_server.runner.gpu.input_batch import ON_DEVICE
from quire_server.runner.gpu.warm_up import prepare
from quire_server.runner.host_executor import HostExecutor
from quire_server.runner.input_batch import InputBatch, SampledPositions
from quire_server.runner.kv_cache import DirtyBlocks
from quire_server.runner.kv_offload import Copied
from quire_server.runner.loader import LoadedModel, load_model
from quire_server.runner.oom_retry import Pending
from quire_server.runner.rank_adapters import LeaderAdapters
from quire_server.runner.rank_executor import LeaderExecutor
from quire_server.runner.ranks import SINGLE, Followers, Membership
from quire_server.runner.structured_outputs import Grammars
from quire_server.text.grammar import Vocabulary
from quire_server.text.tokenizer import Tokenizer

__all__ = ["ModelRunner", "RunnerConfig"]


class ModelRunner:
    """A loaded model, its KV cache, and the input batch of the running requests."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: RunnerConfig,
        grammars: Grammars,
        *,
        ranks: Membership = SINGLE,
        followers: Followers | None = None,
    ) -> None:
        model, kv_caches, device = loaded.model, loaded.kv_caches, loaded.device
        self.model_config = model.config
        self.grammars = grammars
        self.num_blocks, self.max_model_len = loaded.num_blocks, loaded.max_model_len
        self.block_size = options.block_size
        self.dtype, self.quantization = loaded.dtype, loaded.quantization
        self.kv_cache_bytes = sum(cache.nbytes for cache in (*kv_caches, *loaded.draft_caches))
        self._model = model
        self._kv_caches = kv_caches
        self.kv_blocks = loaded.kv_blocks
        self._input_batch = InputBatch(options.max_num_seqs, loaded.max_model_len, options.block_size)
        self._dirty_blocks = DirtyBlocks(self._input_batch, kv_caches)
        batch = None if loaded.adapters is None else loaded.adapters.batch
        self._device: GpuExecutor | None = None
        on_gpu = partial(GpuExecutor, input_batch=self._input_batch, watermark=options.watermark)
        if device is not None:
            drafts = options.num_speculative_tokens
            self._device = on_gpu(model, kv_caches, device=device, adapters=batch, num_drafts=drafts)
        self._executor = self._device or HostExecutor(model, kv_caches, self._input_batch, batch)
        self._leader: LeaderExecutor | None = None
        self.adapters: Adapters | LeaderAdapters | None = loaded.adapters
        if followers is not None:
            self._leader = LeaderExecutor(loaded, self._input_batch, self._executor, ranks, followers)
            if loaded.adapters is not None:
                self.adapters = LeaderAdapters(loaded.adapters, self._leader, ranks.topology.size - 1)
        self._uses_graphs = device is not None and memory_profile.uses_graphs(model, options)
        self._last_result: Callable[[], object] = bool  # waits for the last step sampled on the device
        self._step_tokens = options.max_num_batched_tokens
        self._gpu_memory = loaded.gpu_memory
        self.num_host_slots = loaded.num_host_slots
        self.num_disk_slots = 0 if loaded.disk is None else loaded.disk.num_slots
        self.num_staging_slots = 0 if loaded.staging is None else loaded.staging.num_slots
        self._offload = loaded.offload_worker()
        self._watermark = options.watermark
        self._draft_device: GpuExecutor | None = None
        self._draft_model: DraftModel | None = None
        if (draft := loaded.draft) is not None:
            if device is not None:
                self._draft_device = on_gpu(draft, loaded.draft_caches, device=device, is_draft=True)
                self._captures_draft = memory_profile.uses_graphs(draft, options)
            self._draft_model = DraftModel(
                draft,
                loaded.draft_caches,
                self._input_batch,
                vocab_size=model.config.vocab_size,
                step_tokens=options.max_num_batched_tokens,
                device=self._draft_device,
            )

    @classmethod
    def load(
        cls,
        model_dir: Path,
        options: RunnerConfig,
        on_progress: Callable[[int, int], None],
        *,
        ranks: Membership = SINGLE,
        followers: Followers | None = None,
        device: Device | None = None,
    ) -> "ModelRunner":
        """Read, check and place the model; on_progress(loaded bytes, total bytes) between chunks.
        ``followers``: the other ranks, if this is rank 0 of several. ``device``: instead of the options'.
        """
        with translate_device_errors("while the model is loaded"):
            if device is None:
                device = device_of(options, ranks.topology)
            loaded = load_model(model_dir, options, on_progress, device, ranks)
            config = loaded.model.config
            grammars = Grammars(lambda: _vocabulary(model_dir, config))
            return cls(loaded, options, grammars, ranks=ranks, followers=followers)

    @property
    def gpu_memory(self) -> Mapping[str, int]:
        """Bytes of GPU memory by kind; empty on the host."""
        if self._device is None:
            return {}
        return {**self._gpu_memory, "kv": self.kv_cache_bytes, "graphs": self._graph_bytes}

    @property
    def _graph_bytes(self) -> int:
        return sum(each.graph_bytes for each in (self._device, self._draft_device) if each is not None)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights that each step copies from the host's memory."""
        return self._model.streamed_bytes

    def capture(self, on_progress: Callable[[int, int], None]) -> None:
        """On a GPU, compile what steps launch, then capture the graphs of decode steps; on_progress(graphs
        captured, all), also before each step that compiles.
        """
        if self._device is None:
            return
        with translate_device_errors("while kernels are compiled and graphs captured"):
            prepare(self._device, self._step_tokens, on_progress, has_graphs=self._uses_graphs)
            if self._draft_device is not None:
                prepare(self._draft_device, self._step_tokens, on_progress, has_graphs=self._captures_draft)
            if self._offload is not None:
                self._offload.warm_up()

    @property
    def can_replay(self) -> bool:
        """Whether small steps are replays of a recording."""
        return self._executor.can_replay

    def disable_replay(self) -> None:
        """Compute every step layer by layer: another rank has no recording."""
        self._executor.can_replay = False

    def damage_weight(self) -> None:
        """Make one weight NaN: the fault nan_weight."""
        self._model.norm.weight[0] = float("nan")

    def kv_layout(self) -> Mapping[str, object]:
        """What the bytes of a KV block depend on beside the model's files: not the number of ranks."""
        return {
            "block_size": self.block_size,
            "device": "cuda" if self.is_on_gpu else "cpu",
            "dtype": self.dtype,
            "quantization": self.quantization,
            "stored": str(self._kv_caches[0].dtype),
        }

    def close(self) -> None:
        """Free the disk tier's space."""
        if self._offload is not None:
            self._offload.close()

    @property
    def is_on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self._device is not None

    @property
    def max_steps_in_flight(self) -> int:
        """Steps that may be launched before the result of the first one is awaited. Ranks on GPUs get the
        tokens that rank 0 sampled with the next step, which has to wait for them.
        """
        is_ahead = self._device is not None and self._leader is None
        return 2 if is_ahead else self.model_config.topology.pipeline

    def run(self, step: Step) -> StepResult:
        """One forward pass, and the sampled tokens of each row that gets some."""
        return self.launch(step)()

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        """Start a forward pass, after the drafts that rows want. Results must be awaited in the order of the
        launches, and at most ``max_steps_in_flight`` may be launched and not awaited.
        """
        with translate_device_errors():
            pending = self._launch(step)

        @torch.inference_mode()
        def wait() -> StepResult:
            with translate_device_errors():
                return pending()

        return wait

    def _launch(self, step: Step) -> Pending:
        if self._leader is not None:
            self._leader.begin(step)
        self._input_batch.apply(step)
        if self._device is not None:
            self._device.apply(step)
        assert step.copies is None or self._offload is not None, (
            "the scheduler has offload tiers and the runner has none"
        )
        for slot, number in step.adapter_loads:
            assert self.adapters is not None, "the scheduler has adapter slots and the runner has none"
            self.adapters.load(slot, number)
        copied = self._offload.copy(step) if self._offload is not None else None
        self._dirty_blocks.zero_reused(step)
        if self._leader is not None and not step.rows:
            self._leader.apply_only(step)
        if self._draft_model is None:
            wait = oom_retry.launch(step, self._start, self._input_batch.request_id)
            return wait if copied is None and self._leader is None else partial(self._ended, wait, copied)
        self._draft_model.follow(step)
        drafted, seconds = self._draft_model.propose(step, self._sample_drafts)
        result = oom_retry.launch(drafted, self._start, self._input_batch.request_id)()
        result = dataclasses.replace(result, drafts=drafted.drafts, draft_seconds=seconds)
        ended = self._ended(lambda: result, copied)
        return lambda: ended

    def _ended(self, wait: Pending, copied: Copied | None) -> StepResult:
        """The result of a step, once its copies are complete, too."""
        result, outcome = wait(), None
        if copied is not None:
            copied.finish()
            outcome = copied.outcome
        if self._leader is not None:
            return self._leader.with_copied(result, outcome)
        return result if outcome is None else dataclasses.replace(result, copied=outcome)

    def _start(self, step: Step) -> Pending:
        layout = StepLayout.of(step)
        if self._leader is not None and (self._device is None or self._leader.is_pipelined):
            return self._start_ranks(step, layout, self._leader)
        computed = self._forward(step, layout)
        row_ids, lengths = layout.sampled_rows, layout.sampled_lengths
        if not row_ids.size:
            result = StepResult(step.step_id, (), prompt_logprobs=computed.prompt_logprobs)
            return lambda: result
        if self._device is None:
            result = self._sampled(step, row_ids, lengths, computed)
            self._share_sampled(step, result.token_ids)
            return lambda: result
        wait = self._sample_on_device(step, row_ids, lengths, computed, self._device)

        def result_of() -> StepResult:
            result = wait()
            self._share_sampled(step, result.token_ids)
            return result

        return wait if self._leader is None else result_of

    def _sample_on_device(
        self,
        step: Step,
        row_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        computed: ForwardOutput,
        device: GpuExecutor,
    ) -> Pending:
        """The function waits for the tokens."""
        input_batch = self._input_batch
        forbidden: dict[int, str] = {}
        if input_batch.has_grammar[row_ids].any() or logits_edits.follows_tokens(input_batch, row_ids):
            self._last_result()  # these need the tokens' values
        wait = device.sample(
            computed, row_ids, lengths, self._constraint(device, row_ids, lengths, forbidden)
        )
        if not step.drafts:  # drafts stay, to be compared with the tokens sampled at their positions
            self._write(row_ids, lengths, ON_DEVICE)
        epochs, prompt_logprobs = input_batch.epoch[row_ids], computed.prompt_logprobs

        @cache
        def result_of() -> StepResult:
            with translate_device_errors():
                sampled = wait()
            tokens, failed = gpu_sampler.read(sampled.tokens)
            # The row may belong to another request by now, which must not get these tokens.
            is_same = input_batch.epoch[row_ids] == epochs
            failed = {index: why for index, why in (forbidden | failed).items() if is_same[index]}
            failures = self._failures(failed, row_ids, lengths, tokens)
            self._mark_dirty(failures)
            self._write(row_ids[is_same], lengths[is_same], tokens[is_same])
            logprobs = _by_row(sampled.logprobs, row_ids)
            return StepResult(
                step.step_id, tuple(tokens.tolist()), logprobs, failures, prompt_logprobs=prompt_logprobs
            )

        self._last_result = result_of
        return result_of

    def _constraint(
        self,
        device: GpuExecutor,
        row_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        forbidden: dict[int, str],
    ) -> Callable[[Tensor], None] | None:
        """What masks logits on the device by the grammars of these rows, and adds to ``forbidden`` why there
        is no token, by position; None where no row has one.
        """
        if not self._input_batch.has_grammar[row_ids].any():
            return None

        def constrain(logits: Tensor) -> None:
            rows = (self._input_batch, row_ids, lengths)
            eos_ids = self.model_config.eos_token_ids
            forbidden.update(self.grammars.constrain(logits, *rows, eos_ids, device.upload))

        return constrain

    def _sample_drafts(
        self, computed: ForwardOutput, row_ids: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The tokens of a pass of the draft model, sampled where it computed and written behind their
        contexts.
        """
        device = self._draft_device
        if device is None:
            return self._choose(computed.logits, row_ids, lengths)[0]
        constrain = self._constraint(device, row_ids, lengths, {})
        tokens, _ = gpu_sampler.read(device.sample(computed, row_ids, lengths, constrain)().tokens)
        self._write(row_ids, lengths, tokens)
        return tokens

    def _share_sampled(self, step: Step, tokens: Sequence[int]) -> None:
        """The other ranks, if there are any, get the tokens with the next step."""
        if self._leader is not None:
            self._leader.sampled(step.step_id, tokens)

    def _start_ranks(self, step: Step, layout: StepLayout, leader: LeaderExecutor) -> Pending:
        """As ``_start``, on several ranks on CPUs, and in several stages. Further stages compute while the
        result is not awaited.
        """
        wait = leader.launch(step, layout)
        positions = self._input_batch.positions(layout.sampled_rows, layout.sampled_lengths)

        @torch.inference_mode()
        def result_of() -> StepResult:
            computed = wait()
            if not positions.rows.size:
                return StepResult(step.step_id, (), prompt_logprobs=computed.prompt_logprobs)
            result = self._sampled_where_current(step, positions, computed)
            leader.sampled(step.step_id, result.token_ids)
            return result

        if leader.is_pipelined:
            return result_of
        result = result_of()
        return lambda: result

    def _sampled_where_current(
        self, step: Step, positions: SampledPositions, computed: ForwardOutput
    ) -> StepResult:
        """Sample those rows that still have the request of the step; others get the token 0, which is
        not read.
        """
        rows, lengths, current = positions.rows, positions.lengths, positions.are_current(self._input_batch)
        if current.all():
            return self._sampled_now(step, rows, lengths, computed)
        kept = computed._replace(logits=computed.logits[torch.from_numpy(np.flatnonzero(current))])
        result = self._sampled_now(step, rows[current], lengths[current], kept)
        tokens = np.zeros(len(rows), np.int64)
        tokens[current] = result.token_ids
        return dataclasses.replace(result, token_ids=tuple(tokens.tolist()))

    def _sampled_now(
        self,
        step: Step,
        row_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        computed: ForwardOutput,
    ) -> StepResult:
        """Sample on the GPU, if there is one, what needs more than the largest logits."""
        device = self._device
        if device is None or computed.has_largest:
            return self._sampled(step, row_ids, lengths, computed)
        on_device = computed._replace(logits=computed.logits.to(device.place))
        return self._sample_on_device(step, row_ids, lengths, on_device, device)()

    def _sampled(
        self,
        step: Step,
        row_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        computed: ForwardOutput,
    ) -> StepResult:
        """Sample on the host, where every sampling parameter is supported."""
        input_batch = self._input_batch
        self._last_result()  # the sampler reads the contexts
        logits = computed.logits.cpu()
        if computed.has_largest:
            tokens, failed = sampler.likeliest(logits)
            failures = self._failures(failed, row_ids, lengths, tokens)
            self._write(row_ids, lengths, tokens)
            self._mark_dirty(failures)
            return StepResult(
                step.step_id, tuple(tokens.tolist()), {}, failures, prompt_logprobs=computed.prompt_logprobs
            )
        wants_logprobs = bool((input_batch.num_logprobs[row_ids] >= 0).any())
        raw = logits.clone() if wants_logprobs else logits  # the sampler changes logits in place
        tokens, failures = self._choose(logits, row_ids, lengths)
        self._mark_dirty(failures)
        found = sampler.logprobs(raw, tokens, input_batch.num_logprobs[row_ids]) if wants_logprobs else {}
        return StepResult(
            step.step_id,
            tuple(tokens.tolist()),
            _by_row(found, row_ids),
            failures,
            prompt_logprobs=computed.prompt_logprobs,
        )

    def _forward(self, step: Step, layout: StepLayout) -> ForwardOutput:
        """The logits f32 of the sampled positions, and the requested log-probabilities of prompts."""
        if self._leader is not None:
            return self._leader.launch(step, layout)()
        return self._executor.launch(step, layout, self._executor.graph_for(step, layout))()

    def _choose(
        self, logits: Tensor, row_ids: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], dict[int, str]]:
        """(tokens, failures by row): sample at each position and write the tokens behind their contexts.
        Drafts are sampled in the same way, so that they agree with the model's tokens wherever the models
        agree.
        """
        input_batch, eos_ids = self._input_batch, self.model_config.eos_token_ids
        forbidden = self.grammars.constrain(logits, input_batch, row_ids, lengths, eos_ids)
        tokens, failed = sampler.sample(logits, input_batch, row_ids, lengths, eos_ids, self._watermark)
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
        """Failures by row, of the positions that become part of the output."""
        eos_ids = self.model_config.eos_token_ids
        failures = {
            int(row_ids[index]): why
            for index, why in found.items()
            if why == NOT_FINITE or self._input_batch.is_accepted(index, row_ids, lengths, tokens, eos_ids)
        }
        return failures

    def _mark_dirty(self, failures: dict[int, str]) -> None:
        """Mark the KV blocks of rows whose logits contain NaN."""
        rows = {row for row, why in failures.items() if why not in UNSATISFIABLE}
        self._dirty_blocks.add(rows)
        if self._leader is not None:
            self._leader.mark_dirty(rows)

    def _write(
        self, row_ids: NDArray[np.int64], lengths: NDArray[np.int64], tokens: NDArray[np.int64] | int
    ) -> None:
        """Write tokens behind their contexts, except beyond the longest context."""
        self._input_batch.write(row_ids, lengths, tokens)


def _by_row(
    found: Mapping[int, TokenLogprobs], row_ids: NDArray[np.int64]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """What was found by position, by row."""
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    for index, one in found.items():
        row = int(row_ids[index])
        logprobs[row] = (*logprobs.get(row, ()), one)
    return logprobs


def _vocabulary(model_dir: Path, config: ModelConfig) -> Vocabulary:
    return Vocabulary.of(Tokenizer.load(model_dir), config.eos_token_ids, config.vocab_size)


def device_of(options: RunnerConfig, topology: Topology) -> Device | None:
    """The GPU of a rank; None: it computes on the CPU."""
    if not is_gpu(options.device):
        return None
    if options.dtype == "float32":
        raise ConfigError(
            "--dtype float32 is for --device cpu: the kernels of a GPU are tuned for bfloat16, and none has "
            "been compiled for float32 caches. Use bfloat16 or auto."
        )
    with translate_device_errors("while the model is loaded"):
        return CudaDevice(topology)


def is_gpu(name: str) -> bool:
    """Whether ``--device`` is a GPU; auto: if there is one."""
    return name == "cuda" or (name == "auto" and CudaDevice.is_there())


def gpu_bytes(name: str) -> int | None:
    """Memory of the GPU that ``--device`` is; None: it is a CPU."""
    return CudaDevice.total_bytes() if is_gpu(name) else None
