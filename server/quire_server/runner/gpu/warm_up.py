"""Launches every kernel of steps that are not replays, in every way that serving launches it, so that none is
compiled while requests wait (``core.warm_up_steps`` says which steps that takes).
"""

from collections.abc import Callable

import numpy as np
import torch

from quire_server.core import warm_up_steps
from quire_server.core.step import Step
from quire_server.layers.ops import apply_token_bitmask
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.gpu.executor import GpuExecutor
from quire_server.runner.input_batch import InputBatch

_MASK_BITS = 32


def prepare(
    executor: GpuExecutor, max_tokens: int, on_progress: Callable[[int, int], None], *, has_graphs: bool
) -> None:
    """Compile what steps of up to ``max_tokens`` launch, then capture graphs, if there are any; on_progress
    as ``capture``'s.
    """
    wanted = len(executor.graph_shapes) if has_graphs else 0
    warm_up(executor, max_tokens, lambda: on_progress(0, wanted), has_graphs=has_graphs)
    if has_graphs:
        executor.capture(on_progress)


@torch.inference_mode()
def warm_up(executor: GpuExecutor, max_tokens: int, on_step: Callable[[], None], *, has_graphs: bool) -> None:
    """For the executor's model, before any block of its KV cache is in use. ``has_graphs``: steps without
    prompts will be replays. ``on_step`` is called before each step.
    """
    apart, input_batch = executor.apart()
    num_rows, max_len = input_batch.tokens.shape
    steps = warm_up_steps.steps(
        num_rows, max_tokens, max_len, input_batch.block_size, executor.num_drafts, has_graphs=has_graphs
    )
    with executor.without_other_stages():  # they have other steps to warm up
        for step in steps:
            on_step()
            _run(apart, input_batch, step)


def _run(executor: GpuExecutor, input_batch: InputBatch, step: Step) -> None:
    input_batch.apply(step)
    executor.apply(step)
    layout = StepLayout.of(step)
    output = executor.launch(step, layout, None)()
    if not executor.samples:
        return
    logits = output.logits
    everything = np.full((1, -(-logits.shape[1] // _MASK_BITS)), -1, np.int32)
    first = executor.upload(np.zeros(1, np.int64))
    apply_token_bitmask(logits, executor.upload(everything), first, out=logits)
    executor.sample(output, layout.sampled_rows, layout.sampled_lengths)()
