"""What a forward pass exchanges between ranks, which follows from its step alone: a rank that runs out of
memory within the pass takes part in the rest of it, with parts of no meaning, so that no rank waits for it.
Then rank 0 repeats the pass with fewer rows on all of them.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire_server.core.cuda_graph_shapes import Shape
from quire_server.core.step import Step
from quire_server.layers.parallel import Communicator
from quire_server.models.decoder import Decoder
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
    """One call of the communicator: the rank's part, and the other rank where there is one."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int = 0


def planned(
    step: Step,
    layout: StepLayout,
    input_batch: InputBatch,
    model: Decoder,
    graph: Shape | None,
    *,
    only_largest: bool,
) -> list[Exchange]:
    """The exchanges of a pass in order. Among ranks that share layers: 2 for each layer, 1 for the embedding,
    a gather for logits. Between stages: the hidden states, with the padding of a ``graph``, and the logits of
    the last one. What rank 0 receives from the last stage is not among them.
    """
    config, dtype, tokens = model.config, model.embedding.dtype, step.total_tokens
    topology = config.topology
    states = (2, tokens if graph is None else graph[0] * graph[1], config.hidden_size)
    shares = topology.tensor > 1
    num_sums = (2 * config.num_layers + topology.is_first_stage) * shares
    found = [Exchange(Kind.SUM, (tokens, config.hidden_size), dtype)] * num_sums
    if not topology.is_first_stage:
        found.insert(0, Exchange(Kind.RECV, states, dtype, topology.previous))
    if not topology.is_last_stage:
        return [*found, Exchange(Kind.SEND, states, dtype, topology.next)]
    has_prompt = len(layout.sampled) < tokens
    positions = sampler.prompt_positions(layout, input_batch) if has_prompt else []
    chunks = sampler.prompt_chunks(positions, config.vocab_size)
    for index, rows in enumerate([*chunks, len(layout.sampled)]):
        own, own_dtype, whole, whole_dtype = config.vocab_rows, dtype, config.vocab_size, model.logits_dtype
        if only_largest and index == len(chunks):
            own = whole = 2
            own_dtype = whole_dtype = torch.float32
        if shares:
            found.append(Exchange(Kind.GATHER, (rows, own), own_dtype))
        if topology.rank == topology.head_rank != 0 and rows:
            found.append(Exchange(Kind.SEND, (rows, whole), whole_dtype))
    return found


def take_part(communicator: Communicator, rest: Sequence[Exchange], device: torch.device) -> None:
    """Make these exchanges with zeros, which are on the device."""
    for kind, shape, dtype, rank in rest:
        if kind is Kind.RECV:
            communicator.recv(shape, dtype, rank)
            continue
        part = torch.zeros(shape, dtype=dtype, device=device)
        if kind is Kind.GATHER:
            communicator.gather_to_leader(part)
        elif kind is Kind.SUM:
            communicator.all_reduce(part)
        else:
            communicator.send(part, rank)
