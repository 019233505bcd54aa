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
from quire_server.runner.rows import Rows

_EACH_GRAPH = 32 << 20  # beside the memory that all graphs share: launches and their arguments


def arithmetic(options: RunnerOptions) -> RunnerOptions:
    """The options as they hold on a GPU, or ConfigError for what only the CPU can do."""
    if options.quantization == "int8":
        raise ConfigError("--quantization int8 is the CPU's arithmetic: use none or auto with --device cuda.")
    if options.speculative_model is not None:
        raise ConfigError(
            "--speculative-method draft-model runs with --device cpu only: use ngram with --device cuda."
        )
    return dataclasses.replace(options, quantization="none")


def is_told(options: RunnerOptions) -> bool:
    """Whether the user has said how large the cache is."""
    return options.num_blocks_override is not None or options.kv_cache_memory_bytes is not None


def uses_graphs(config: ModelConfig, options: RunnerOptions) -> bool:
    """Whether decode steps are captured. Which experts run is looked up on the host, which a graph cannot."""
    return config.experts is None and not options.enforce_eager


def measure(
    model: Decoder, options: RunnerOptions, device: Device, stored: torch.dtype, longest: int
) -> Measured:
    """What the GPU's memory is taken for, the model being there and the cache not yet."""
    memory = device.memory()
    num_rows = options.max_num_seqs
    rows = Rows(num_rows, longest, options.block_size)
    caches = kv_cache.allocate(model.config, 1, options.block_size, dtype=stored, device=device.place)
    steps = DeviceSteps(model, caches, rows, device)

    def run(step: Step) -> int:
        return device.peak_bytes(lambda: _run(steps, rows, step))

    workspace = run(largest_step(num_rows, min(options.max_num_batched_tokens, longest), options.block_size))
    graphs = 0
    if uses_graphs(model.config, options):
        shapes = graph_buckets.shapes(num_rows, options.num_speculative_tokens)
        largest = max(sequences * tokens for sequences, tokens in shapes)
        largest = min(largest, num_rows - 1 + longest)
        graphs = run(largest_step(num_rows, largest, options.block_size)) + len(shapes) * _EACH_GRAPH
    others = memory.total - memory.free - memory.reserved
    return Measured(memory.total, others, memory.allocated, workspace, graphs)


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


def largest_step(num_rows: int, num_tokens: int, block_size: int) -> Step:
    """One that samples for all rows and computes ``num_tokens``, most of them of one prompt. All keys and
    values go to the first block, whatever is in it.
    """
    num_rows = min(num_rows, num_tokens)
    counts = (num_tokens - num_rows + 1, *(1,) * (num_rows - 1))
    order = range(num_rows) if counts[0] == 1 else (*range(1, num_rows), 0)  # single tokens go first
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
        samples=(1,) * num_rows,
    )


@torch.inference_mode()
def _run(steps: DeviceSteps, rows: Rows, step: Step) -> np.ndarray:
    rows.apply(step)
    steps.apply(step)
    spans = batch.Spans.of(step)
    return steps.sample(steps.compute(step, spans), spans)()
