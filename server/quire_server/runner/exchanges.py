"""What a forward pass exchanges between ranks, which follows from its step alone: a rank that runs out of
memory within the pass takes part in the rest of it, with parts of no meaning, so that no rank waits for it.
Then rank 0 repeats the pass with fewer rows on all of them.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire_server.core.step import Step
from quire_server.layers.parallel import Communicator
from quire_server.models.config import ModelConfig
from quire_server.runner import sampler
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.input_batch import InputBatch


class Kind(enum.Enum):
    """The methods of a communicator."""

    SUM = enum.auto()
    GATHER = enum.auto()
    SEND = enum.auto()
    RECV = enum.auto()


class Exchange(NamedTuple):
    """One call of the communicator: the shape of a rank's part, and the other rank where there is one."""

    kind: Kind
    shape: tuple[int, ...]
    rank: int = 0


def planned(
    step: Step, layout: StepLayout, input_batch: InputBatch, config: ModelConfig, *, is_replay: bool
) -> list[Exchange]:
    """The exchanges of a pass in order. Among ranks that share layers: 2 for each layer, 1 for the embedding,
    a gather for logits. Between stages: the hidden states, and the logits of the last one. What rank 0
    receives from the last stage is not among them.
    """
    topology, tokens = config.topology, step.total_tokens
    states = (2, tokens, config.hidden_size)
    shares = topology.tensor > 1
    num_sums = (2 * config.num_layers + topology.is_first_stage) * shares
    found = [Exchange(Kind.SUM, (tokens, config.hidden_size))] * num_sums
    if not topology.is_first_stage:
        found.insert(0, Exchange(Kind.RECV, states, topology.previous))
    if not topology.is_last_stage:
        return [*found, Exchange(Kind.SEND, states, topology.next)]
    if is_replay:
        computed = [tokens]
    else:
        has_prompt = len(layout.sampled) < tokens
        positions = sampler.prompt_positions(layout, input_batch) if has_prompt else []
        computed = [*sampler.prompt_chunks(positions, config.vocab_size), len(layout.sampled)]
    for rows in computed:
        if shares:
            found.append(Exchange(Kind.GATHER, (rows, config.vocab_rows)))
        if topology.rank == topology.head_rank != 0 and rows:
            found.append(Exchange(Kind.SEND, (rows, config.vocab_size)))
    return found


def take_part(
    communicator: Communicator, rest: Sequence[Exchange], dtype: torch.dtype, logits_dtype: torch.dtype
) -> None:
    """Make these exchanges with zeros. ``logits_dtype``: of logits between stages."""
    for kind, shape, rank in rest:
        if kind is Kind.RECV:
            communicator.recv(shape, dtype, rank)
            continue
        part = torch.zeros(shape, dtype=logits_dtype if kind is Kind.SEND and len(shape) == 2 else dtype)
        if kind is Kind.GATHER:
            communicator.gather_to_leader(part)
        elif kind is Kind.SUM:
            communicator.all_reduce(part)
        else:
            communicator.send(part, rank)
