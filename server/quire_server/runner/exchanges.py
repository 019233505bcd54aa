"""What a forward pass exchanges between ranks, which follows from its step alone: a rank that runs out of
memory within the pass takes part in the rest of it, with parts of no meaning, so that no rank waits for it.
Then rank 0 repeats the pass with fewer rows on all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire_server.core.step import Step
from quire_server.layers.parallel import Communicator
from quire_server.models.config import ModelConfig
from quire_server.runner import sampler
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.input_batch import InputBatch


class Exchange(NamedTuple):
    """One call of the communicator: the shape of a rank's part."""

    is_gather: bool
    rows: int
    width: int


def planned(
    step: Step, layout: StepLayout, input_batch: InputBatch, config: ModelConfig, *, is_replay: bool
) -> list[Exchange]:
    """The exchanges of a pass in order: 2 for each layer, 1 for the embedding, a gather for logits."""
    sums = [Exchange(False, step.total_tokens, config.hidden_size)] * (2 * config.num_layers + 1)
    if is_replay:
        gathered = [step.total_tokens]
    else:
        has_prompt = len(layout.sampled) < step.total_tokens
        prompt = sampler.prompt_chunks(layout, input_batch, config.vocab_size) if has_prompt else []
        gathered = [*prompt, len(layout.sampled)]
    return sums + [Exchange(True, rows, config.vocab_rows) for rows in gathered]


def take_part(communicator: Communicator, rest: Sequence[Exchange], dtype: torch.dtype) -> None:
    """Make these exchanges with zeros."""
    for exchange in rest:
        part = torch.zeros(exchange.rows, exchange.width, dtype=dtype)
        if exchange.is_gather:
            communicator.gather_to_leader(part)
        else:
            communicator.all_reduce(part)
