"""The interface between rank 0 and the other ranks of a distributed model: one RankStep goes out for each
forward pass, one Echo comes back from each rank.

Rank 0 schedules and samples; the others keep an input batch and a KV cache of their own up to date from its
messages, and compute. Nothing here knows tensors or sockets.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire_server.core.cuda_graph_shapes import Shape
from quire_server.core.step import CopyOutcome, Step

#: The part of a step's id by which later messages name it.
STEP_MASK = (1 << 31) - 1


class AdapterOrder(NamedTuple):
    """To the other ranks: read their parts of the LoRA adapter in this directory and keep it under a number,
    in place of another one, if ``replaces`` is not 0; without a directory, forget what has the number.
    """

    number: int
    directory: str
    replaces: int


class AdapterReport(NamedTuple):
    """A rank has read its part of an adapter, of a content with this digest, or could not, for a reason."""

    number: int
    digest: str
    reason: str


@dataclass(frozen=True, slots=True)
class RankStep:
    """One forward pass, and what earlier ones led to since the last message. ``step`` has no sampling
    parameters, seeds and request ids, which only rank 0 needs.

    A pass is repeated with fewer rows when a rank runs out of memory: then the step has the same id, rows,
    and nothing that was applied already.
    """

    step: Step
    sampled_steps: tuple[int, ...] = ()  # the steps (STEP_MASK) whose tokens are known now, in order
    sampled: Sequence[int] = ()  # the tokens of these steps, at all positions that each one sampled
    nan_rows: tuple[int, ...] = ()  # rows whose logits were not finite
    graph: Shape | None = None  # of the recording that all ranks replay: none of them chooses it itself
    only_largest: bool = False  # whether rank 0 needs only the largest logit of each position, and its token
    adapter_orders: tuple[AdapterOrder, ...] = ()  # before the pass


class EchoStatus(enum.IntEnum):
    """How a pass ended on one rank."""

    DONE = 0
    OUT_OF_MEMORY = 1
    LOST_PEER = 2  # another rank did not take part in an exchange


class Work(NamedTuple):
    """What a rank did for a pass. ``micros``: microseconds, without those in which it waited for other ranks;
    0 where there was nothing to compute. ``exchanged``: bytes that it gave to other ranks.
    """

    micros: int
    exchanged: int

    def plus(self, other: Work) -> Work:
        """Of two parts of a pass."""
        return Work(self.micros + other.micros, self.exchanged + other.exchanged)


NO_WORK = Work(0, 0)


@dataclass(frozen=True, slots=True)
class Echo:
    """A rank has executed a pass. ``digest``: of all messages so far, so that ranks which received different
    ones are found at once.
    """

    sequence: int
    digest: int
    status: EchoStatus = EchoStatus.DONE
    copied: CopyOutcome | None = None  # of the rank's own part of the blocks; None: no copy has ended
    work: Work = NO_WORK
    adapters: tuple[AdapterReport, ...] = ()  # that were read since the last echo


@dataclass(frozen=True, slots=True)
class RankLimits:
    """Bounds of what a RankStep may name. A message beyond them is invalid."""

    num_rows: int
    num_blocks: int
    num_host_slots: int
    num_disk_slots: int
    max_model_len: int
    vocab_size: int
    num_adapter_slots: int = 0
