"""A request while the engine works on it: its tokens so far, its blocks, its row.

Owned and changed by the scheduler alone; ``stopping`` reads it. What the client asked for stays in
``core.request``.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from quire_server.core.prefix_chain import PrefixChain
from quire_server.core.request import Request
from quire_server.core.step import StartedRow


class Status(Enum):
    """Where a sequence stands; see TRANSITIONS."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS = {
    Status.WAITING: {Status.RUNNING, Status.FINISHED},
    Status.RUNNING: {Status.WAITING, Status.FINISHED},  # back to waiting: preempted
    Status.FINISHED: set[Status](),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """``num_computed`` chases ``len(tokens)``; prefill, decode and recomputation are the same chase."""

    request: Request
    order: tuple[int, int]  # (-priority, number of arrival): smaller goes first, larger is preempted first
    seed: int
    stop_ids: frozenset[int]
    max_total: int  # tokens, prompt included, at which the answer ends
    min_total: int  # tokens, prompt included, before which no stop token counts
    tokens: list[int]
    chain: PrefixChain
    status: Status = Status.WAITING
    num_computed: int = 0
    num_published: int = 0  # blocks offered to the prefix cache
    block_ids: list[int] = field(default_factory=list)
    capacity: int = 0  # len(block_ids) * block_size
    row: int = -1  # the runner's row; means something only while RUNNING
    num_cached_tokens: int | None = None  # of the first admission; later ones only find what was preempted
    swapped: list[int] = field(default_factory=list)  # host slots that hold its blocks while it waits
    num_swapped: int = 0  # tokens in them
    has_fetched: bool = False  # it waited for the disk once; it does not do so again

    def become(self, status: Status) -> None:
        """The only place where a status changes."""
        assert status in TRANSITIONS[self.status], (self.request.request_id, self.status, status)
        self.status = status


def start(
    request: Request, *, number: int, seed: int, eos_ids: Collection[int], max_model_len: int
) -> Sequence:
    """A waiting sequence for a request that was found to fit."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    return Sequence(
        request=request,
        order=(-request.priority, number),
        seed=seed,
        stop_ids=frozenset(sampling.stop_token_ids)
        | (frozenset() if sampling.ignore_eos else frozenset(eos_ids)),
        max_total=min(len(prompt) + sampling.max_tokens, max_model_len),
        min_total=len(prompt) + sampling.min_tokens,
        tokens=list(prompt),
        chain=PrefixChain(request.cache_salt),
    )


def started_row(sequence: Sequence) -> StartedRow:
    """What the runner has to know when the sequence takes its row."""
    return StartedRow(
        row=sequence.row,
        request_id=sequence.request.request_id,
        token_ids=tuple(sequence.tokens),
        num_prompt_tokens=len(sequence.request.prompt_token_ids),
        block_ids=tuple(sequence.block_ids),
        sampling=sequence.request.sampling,
        seed=sequence.seed,
    )
