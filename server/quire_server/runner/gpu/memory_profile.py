"""Memory profile of a GPU: runs the largest steps that the limits allow before the KV cache is allocated, and
sizes the cache by what is left. Also checks the settings that depend on the GPU.
"""

import dataclasses

import torch

from quire_server.core import cuda_graph_shapes, gpu_memory
from quire_server.core.gpu_memory import KVCacheRequirements, MemoryUsage
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import StartedRow, Step
from quire_server.errors import ConfigError
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Decoder
from quire_server.runner import kv_cache
from quire_server.runner.adapters import Adapters
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.config import RunnerConfig
from quire_server.runner.gpu.block_copies import device_bytes
from quire_server.runner.gpu.device import Device
from quire_server.runner.gpu.executor import GpuExecutor
from quire_server.runner.input_batch import InputBatch
from quire_server.runner.quantization import FIRST_WITH_FP8

_LOGIT_BYTES = 4  # float32
_MOST_LOGPROBS = 20
_OLDEST = 80  # the kernels compute in bfloat16 and copy asynchronously, which older GPUs cannot


def arithmetic(options: RunnerConfig, capability: int) -> RunnerConfig:
    """The options as they apply to a GPU of this compute capability. Raises ConfigError for what it cannot
    do.
    """
    if capability < _OLDEST:
        raise ConfigError(
            f"This GPU has compute capability {capability // 10}.{capability % 10}, and the kernels need 8.0 "
            "or more (A100, A10, L4, L40S, H100, H200): take one of these, or use --device cpu."
        )
    if options.kv_cache_dtype == "fp8" and capability < FIRST_WITH_FP8:
        raise ConfigError(
            f"--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or more, and this one has "
            f"{capability // 10}.{capability % 10}: use int8, which takes as little memory."
        )
    if options.quantization in ("int8", "int4"):
        raise ConfigError(
            f"--quantization {options.quantization} is the CPU's arithmetic: use none or auto with "
            "--device cuda."
        )
    return dataclasses.replace(options, quantization="none")


def is_size_given(options: RunnerConfig) -> bool:
    """Whether the user set the size of the KV cache."""
    return options.num_blocks_override is not None or options.kv_cache_memory_bytes is not None


def uses_graphs(model: Decoder, options: RunnerConfig) -> bool:
    """Whether decode steps are captured. Not if the host reads results in the middle of a pass; nor if
    weights are streamed from the host, since launches are not the bottleneck then.
    """
    return not model.needs_host_sync and model.stream is None and not options.enforce_eager


def measure(
    model: Decoder,
    options: RunnerConfig,
    device: Device,
    stored: torch.dtype,
    longest: int,
    draft: Decoder | None = None,
    adapters: Adapters | None = None,
) -> MemoryUsage:
    """What takes the GPU's memory once the model and its draft model are loaded and the cache is not. The two
    models never compute at the same time; each has its own graphs. What is not torch's is counted after they
    have computed: kernels, and the buffers of NCCL, are there by then.
    """
    weights = device.memory().allocated
    drafts = min(options.num_speculative_tokens, longest - 1)
    model.is_apart = True  # other stages may still read their weights
    peaks = [_peaks(model, options, device, stored, longest, drafts, adapters)]
    model.is_apart = False
    if draft is not None:
        peaks.append(_peaks(draft, options, device, draft.embedding.dtype, longest, 0))
    workspaces, graphs = zip(*peaks, strict=True)
    memory = device.memory()
    others = memory.total - memory.free - memory.reserved
    workspace = max(workspaces) + _copies(model.config, options, stored)
    return MemoryUsage(memory.total, others, weights, workspace, sum(graphs))


def _copies(config: ModelConfig, options: RunnerConfig, stored: torch.dtype) -> int:
    """The buffers through which KV blocks go to and from the host, where any do."""
    if not (options.kv_offload_host_bytes or options.shares_kv_cache):
        return 0
    return device_bytes(kv_cache.block_bytes(config, options.block_size, stored))


def _peaks(
    model: Decoder,
    options: RunnerConfig,
    device: Device,
    stored: torch.dtype,
    longest: int,
    drafts: int,
    adapters: Adapters | None = None,
) -> tuple[int, int]:
    """(bytes of the largest step, bytes of all graphs) of one model with up to ``drafts`` drafts per row."""
    num_rows, block_size = options.max_num_seqs, options.block_size
    input_batch = InputBatch(num_rows, longest, block_size)
    caches = kv_cache.allocate(model.config, 1, block_size, dtype=stored, device=device.place)
    steps = GpuExecutor(
        model,
        caches,
        input_batch,
        device,
        num_drafts=drafts,
        adapters=None if adapters is None else adapters.batch,
    )
    samples = model.config.topology.is_leader

    def run(step: Step) -> int:
        return device.peak_bytes(lambda: _run(steps, input_batch, step, samples=samples))

    workspace = run(largest_step(num_rows, min(options.max_num_batched_tokens, longest), block_size, drafts))
    if not uses_graphs(model, options):
        return workspace, 0
    shapes = cuda_graph_shapes.shapes(num_rows, drafts)
    sequences, tokens = shapes[0]  # of most tokens, each of which is sampled
    peak = run(largest_step(sequences, sequences * tokens, block_size, tokens - 1))
    return workspace, gpu_memory.graph_bytes(peak, shapes, _LOGIT_BYTES * model.config.vocab_size)


def sized(
    options: RunnerConfig, measured: MemoryUsage, config: ModelConfig, block_bytes: int
) -> RunnerConfig:
    """The options with as many blocks as fit, unless the user set the size."""
    if is_size_given(options):
        return options
    longest = kv_cache.longest_context(config, options)
    wanted = KVCacheRequirements(
        block_bytes, options.block_size, options.max_model_len, kv_cache.useful_blocks(options, longest)
    )
    count = gpu_memory.num_blocks(measured, options.gpu_memory_utilization, wanted)
    return dataclasses.replace(options, num_blocks_override=count)


def largest_step(num_rows: int, num_tokens: int, block_size: int, num_drafts: int = 0) -> Step:
    """A step of ``num_tokens`` that samples for all rows, with as many drafts each as fit; the remaining
    tokens are one prompt. All keys and values go to the first block, whose content does not matter.
    """
    num_rows = min(num_rows, num_tokens)
    drafted = num_tokens - num_rows
    samples = [1 + min(num_drafts, max(0, drafted - row * num_drafts)) for row in range(num_rows)]
    counts = [num_tokens - sum(samples[1:]), *samples[1:]]
    order = (*range(1, num_rows), 0)  # rows not sampled at every token come last
    sampling = SamplingParams(
        1, temperature=1.0, top_k=2, top_p=0.5, min_p=0.5, presence_penalty=1.0, logprobs=_MOST_LOGPROBS
    )
    started = tuple(
        StartedRow(
            row, "", (0,) * counts[row], counts[row], (0,) * -(-counts[row] // block_size), sampling, 0
        )
        for row in order
    )
    return Step(
        step_id=0,
        started=started,
        new_blocks=(),
        rows=tuple(order),
        starts=(0,) * num_rows,
        num_tokens=tuple(counts[row] for row in order),
        samples=tuple(samples[row] for row in order),
    )


@torch.inference_mode()
def _run(steps: GpuExecutor, input_batch: InputBatch, step: Step, *, samples: bool) -> None:
    input_batch.apply(step)
    steps.apply(step)
    layout = StepLayout.of(step)
    wait = steps.launch(step, layout, None)
    if samples:
        steps.sample(wait(), layout.sampled_rows, layout.sampled_lengths)()
