"""What a GPU needs to be known before its KV cache is made: how the model computes there, and how much memory
is left, by running the largest steps that the limits allow. Called by ``parts`` once.
"""

import dataclasses

import numpy as np
import torch

from quire_server.core import gpu_memory, graph_buckets
from quire_server.core.errors import ConfigError
from quire_server.core.gpu_memory import Measured, Wanted
from quire_server.core.request import SamplingParams
from quire_server.core.step import StartedRow, Step
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Decoder
from quire_server.runner import batch, kv_cache
from quire_server.runner.device import Device
from quire_server.runner.device_steps import DeviceSteps
from quire_server.runner.options import RunnerOptions
from quire_server.runner.quantization import FIRST_WITH_FP8
from quire_server.runner.rows import Rows

_LOGIT_BYTES = 4  # float32


def arithmetic(options: RunnerOptions, capability: int) -> RunnerOptions:
    """The options as they hold on a GPU of a compute capability, or ConfigError for what it cannot do."""
    if options.kv_cache_dtype == "fp8" and capability < FIRST_WITH_FP8:
        raise ConfigError(
            f"--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or more, and this one has "
            f"{capability // 10}.{capability % 10}: use int8, which takes as little memory."
        )
    if options.quantization == "int8":
        raise ConfigError("--quantization int8 is the CPU's arithmetic: use none or auto with --device cuda.")
    return dataclasses.replace(options, quantization="none")


def is_told(options: RunnerOptions) -> bool:
    """Whether the user has said how large the cache is."""
    return options.num_blocks_override is not None or options.kv_cache_memory_bytes is not None


def uses_graphs(model: Decoder, options: RunnerOptions) -> bool:
    """Whether decode steps are captured. They cannot be where the host has to look at results, and where
    weights are on their way through every step, launching is not what takes the time.
    """
    return not model.asks_host and model.stream is None and not options.enforce_eager


def measure(
    model: Decoder,
    options: RunnerOptions,
    device: Device,
    stored: torch.dtype,
    longest: int,
    *,
    draft: Decoder | None = None,
) -> Measured:
    """What the GPU's memory is taken for, the model and its draft model being there and the cache not yet.
    The two never compute at once; each has graphs of its own.
    """
    memory = device.memory()
    drafts = min(options.num_speculative_tokens, longest - 1)
    peaks = [_peaks(model, options, device, stored, longest, drafts)]
    if draft is not None:
        peaks.append(_peaks(draft, options, device, draft.embedding.dtype, longest, 0))
    workspaces, graphs = zip(*peaks, strict=True)
    others = memory.total - memory.free - memory.reserved
    return Measured(memory.total, others, memory.allocated, max(workspaces), sum(graphs))


def _peaks(
    model: Decoder, options: RunnerOptions, device: Device, stored: torch.dtype, longest: int, drafts: int
) -> tuple[int, int]:
    """Bytes of the largest step and of all graphs, of one model whose rows have so many drafts."""
    num_rows, block_size = options.max_num_seqs, options.block_size
    rows = Rows(num_rows, longest, block_size)
    caches = kv_cache.allocate(model.config, 1, block_size, dtype=stored, device=device.place)
    steps = DeviceSteps(model, caches, rows, device)

    def run(step: Step) -> int:
        return device.peak_bytes(lambda: _run(steps, rows, step))

    workspace = run(largest_step(num_rows, min(options.max_num_batched_tokens, longest), block_size, drafts))
    if not uses_graphs(model, options):
        return workspace, 0
    shapes = graph_buckets.shapes(num_rows, drafts)
    sequences, tokens = shapes[0]  # of most tokens, each of which is sampled
    peak = run(largest_step(sequences, sequences * tokens, block_size, tokens - 1))
    return workspace, gpu_memory.graph_bytes(peak, shapes, _LOGIT_BYTES * model.config.vocab_size)


def sized(options: RunnerOptions, measured: Measured, config: ModelConfig, block_bytes: int) -> RunnerOptions:
    """The options with as many blocks as there is room for, unless the user has said how many."""
    if is_told(options):
        return options
    longest = kv_cache.longest_context(config, options)
    wanted = Wanted(
        block_bytes, options.block_size, options.max_model_len, kv_cache.useful_blocks(options, longest)
    )
    count = gpu_memory.num_blocks(measured, options.gpu_memory_utilization, wanted)
    return dataclasses.replace(options, num_blocks_override=count)


def largest_step(num_rows: int, num_tokens: int, block_size: int, num_drafts: int = 0) -> Step:
    """One of ``num_tokens``, that samples for all rows, at as many drafts of each as fit; the tokens that are
    left are of one prompt. All keys and values go to the first block, whatever is in it.
    """
    num_rows = min(num_rows, num_tokens)
    drafted = num_tokens - num_rows
    samples = [1 + min(num_drafts, max(0, drafted - row * num_drafts)) for row in range(num_rows)]
    counts = [num_tokens - sum(samples[1:]), *samples[1:]]
    order = (*range(1, num_rows), 0)  # what is not sampled everywhere goes last
    sampling = SamplingParams(1, temperature=1.0, top_k=2, top_p=0.5, min_p=0.5)
    started = tuple(
        StartedRow(
            row, "", (0,) * counts[row], counts[row], (0,) * -(-counts[row] // block_size), sampling, 0
        )
        for row in order
    )
    return Step(
        step_id=0,
        started=started,
        grown=(),
        rows=tuple(order),
        starts=(0,) * num_rows,
        num_tokens=tuple(counts[row] for row in order),
        samples=tuple(samples[row] for row in order),
    )


@torch.inference_mode()
def _run(steps: DeviceSteps, rows: Rows, step: Step) -> np.ndarray:
    rows.apply(step)
    steps.apply(step)
    spans = batch.Spans.of(step)
    return steps.sample(steps.compute(step, spans), spans)()
