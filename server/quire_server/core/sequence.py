"""A request while the engine works on it: its tokens so far, its blocks, its row.

Owned and changed by the scheduler alone; ``stopping`` reads it. What the client asked for stays in
``core.request``.
"""

import time
from dataclasses import dataclass, field
from enum import Enum

from quire_server.core.drafting import Drafting
from quire_server.core.prefix_chain import PrefixChain
from quire_server.core.request import Request
from quire_server.core.timing import Timing


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
    order: tuple[float, int]  # (virtual arrival, number): smaller goes first, larger is preempted first
    seed: int
    stop_ids: frozenset[int]
    max_total: int  # tokens, prompt included, at which the answer ends
    min_total: int  # tokens, prompt included, before which no stop token counts
    tokens: list[int]
    chain: PrefixChain
    status: Status = Status.WAITING
    queued_at: float = field(default_factory=time.monotonic)
    scheduled_at: float = 0.0
    first_token_at: float | None = None
    num_preemptions: int = 0
    num_computed: int = 0
    num_published: int = 0  # blocks offered to the prefix cache
    block_ids: list[int] = field(default_factory=list)
    capacity: int = 0  # len(block_ids) * block_size
    row: int = -1  # the runner's row; means something only while RUNNING
    watch_from: int = 0  # num_computed from which on a commit has more to do than to count
    num_to_report: int = 0  # positions of the prompt whose log-probabilities were asked for
    num_reported: int = 0  # of these
    num_cached_tokens: int | None = None  # of the first admission; later ones only find what was preempted
    swapped: list[int] = field(default_factory=list)  # host slots that hold its blocks while it waits
    num_swapped: int = 0  # tokens in them
    has_fetched: bool = False  # it waited for the disk once; it does not do so again
    drafting: Drafting | None = None  # from its first chance to draft on

    def become(self, status: Status) -> None:
        """The only place where a status changes."""
        assert status in TRANSITIONS[self.status], (self.request.request_id, self.status, status)
        self.status = status
        if status is Status.RUNNING and self.first_token_at is None:
            self.scheduled_at = time.monotonic()

    def stamp(self, *, is_last: bool) -> Timing | None:
        """With the first token and with the last event, where the time went; None in between."""
        if self.first_token_at is not None and not is_last:
            return None
        now = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = now
        return Timing(
            self.queued_at,
            self.scheduled_at,
            self.first_token_at,
            now if is_last else None,
            self.num_preemptions,
        )

    def watch(self, block_size: int) -> None:
        """Say when a commit has to look again: at the next full block, and at the longest answer's end."""
        is_plain = self.request.sampling.logprobs is None
        next_block = (self.num_published + 1) * block_size
        self.watch_from = min(next_block, self.max_total - 1) if is_plain else 0
