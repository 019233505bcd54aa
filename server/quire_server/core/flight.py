"""A step that the runner has and the scheduler has not committed, and what may be assumed of it meanwhile.

Called by the scheduler. One step may be decided ahead while the one before it is computed: all that is not
known is which tokens come, and most decisions do not need them. Knows no blocks and no budget.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire_server.core.sequence import Sequence, Status
from quire_server.core.step import Step

UNKNOWN = -1  # stands for a token that is still being computed; never leaves ``assumed``


@dataclass(slots=True, eq=False)
class Flight:
    """``sequences`` in the step's order; the first ``num_continuing`` ran before, and lacked one token."""

    step: Step
    sequences: list[Sequence]
    num_continuing: int
    is_disturbed: bool = False  # one of them ended since the step was decided: its result is nobody's


@contextmanager
def assumed(flight: Flight) -> Iterator[None]:
    """Within it every sequence stands where the flight is going to leave it, unless it ends there."""
    computing = [
        (sequence, num_tokens, samples)
        for sequence, num_tokens, samples in zip(
            flight.sequences, flight.step.num_tokens, flight.step.samples, strict=True
        )
        if sequence.status is Status.RUNNING
    ]
    for sequence, num_tokens, samples in computing:
        sequence.num_computed += num_tokens
        if samples:
            sequence.tokens.append(UNKNOWN)
    try:
        yield
    finally:
        for sequence, num_tokens, samples in computing:
            sequence.num_computed -= num_tokens
            if samples:
                sequence.tokens.pop()


def going_on(sequences: list[Sequence]) -> list[Sequence]:
    """Of sequences as they are assumed, those whose answer has room for more."""
    return [sequence for sequence in sequences if len(sequence.tokens) < sequence.max_total]


def num_growing(sequences: list[Sequence]) -> int:
    """How many lack one token and have no block for it."""
    return sum(
        sequence.num_computed == sequence.capacity and sequence.num_computed + 1 == len(sequence.tokens)
        for sequence in sequences
    )
