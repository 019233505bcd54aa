"""A request while the engine works on it: its tokens so far, its KV blocks, its row, and when its answer
ends.

Only the scheduler and its parts change a sequence. What the client asked for stays in ``core.request``.
"""

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum

from quire_server.core.block_hash import BlockHashChain
from quire_server.core.draft_length import DraftState
from quire_server.core.request import FinishReason, Request
from quire_server.core.stats import Timing


class Status(Enum):
    """The state of a sequence; TRANSITIONS has the allowed changes."""

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
    """``num_computed`` catches up with ``len(tokens)``, in prefill, decode and recomputation alike."""

    request: Request
    order: tuple[float, int]  # (virtual arrival, number): smaller goes first, larger is preempted first
    seed: int
    stop_ids: frozenset[int]
    max_total: int  # tokens, prompt included, at which the answer ends
    min_total: int  # tokens, prompt included, before which a stop token does not end the answer
    expected_total: int  # tokens, prompt included, at which the answer is expected to end
    tokens: list[int]
    block_hashes: BlockHashChain
    status: Status = Status.WAITING
    queued_at: float = field(default_factory=time.monotonic)
    scheduled_at: float = 0.0
    first_token_at: float | None = None
    num_preemptions: int = 0
    num_computed: int = 0
    num_published: int = 0  # full blocks that the prefix cache knows
    block_ids: list[int] = field(default_factory=list)
    capacity: int = 0  # len(block_ids) * block_size
    row: int = -1  # the runner's row; valid only while RUNNING
    slot: int = 0  # of a pipeline, in whose steps it runs
    check_from: int = 0  # value of num_computed from which a commit has to do more than append the token
    num_prompt_logprobs: int = 0  # prompt positions whose logprobs the client asked for
    num_prompt_logprobs_sent: int = 0
    num_cached_tokens: int | None = (
        None  # prefix hits of the first start; later ones also find its own blocks
    )
    num_fetched_tokens: int = 0  # of the prompt, computed by another server for this request
    swap_slots: list[int] = field(default_factory=list)  # host slots with its blocks while it is swapped out
    num_swapped_tokens: int = 0
    has_waited_for_disk: bool = False  # for a prefix on the disk: once is enough
    leader: "Sequence | None" = None  # that computes blocks which it waits for, see ``shared_prefill``
    num_shared_blocks: int = 0  # that the leader has or will have published when it need not wait any more
    adapter: int = 0  # its number in ``adapter_slots``; 0: none
    draft_state: DraftState | None = None  # from its first draft on

    def transition(self, status: Status) -> None:
        """The only place where a status changes."""
        assert status in TRANSITIONS[self.status], (self.request.request_id, self.status, status)
        self.status = status
        if status is Status.RUNNING and self.first_token_at is None:
            self.scheduled_at = time.monotonic()

    def finish_reason(self) -> FinishReason | None:
        """Whether the newest token ends the answer, and why. (Stop strings are matched by the API
        process.)
        """
        length = len(self.tokens)
        if self.tokens[-1] in self.stop_ids and length > self.min_total:
            return FinishReason.STOP
        if length >= self.max_total:
            return FinishReason.LENGTH
        return None

    def append_tokens(self, token_ids: Tokens[int]) -> tuple[int, FinishReason | None]:
        """Append tokens up to the one that ends the answer: (number of tokens, reason)."""
        for count, token in enumerate(token_ids, start=1):
            self.tokens.append(token)
            if (reason := self.finish_reason()) is not None:
                return count, reason
        return len(token_ids), None

    def update_expected_total(self) -> None:
        """An answer that is longer than expected is expected to become twice as long as it is."""
        if (length := len(self.tokens)) > self.expected_total:
            num_generated = length - len(self.request.prompt_token_ids)
            self.expected_total = min(length + num_generated, self.max_total)

    def timing(self, *, is_last: bool) -> Timing | None:
        """The timestamps for the event of the first token and for the last event; None for those between."""
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

    def update_check_from(self, block_size: int) -> None:
        """A commit has more to do when a block is full, and at the maximum length; with logprobs, always."""
        is_plain = self.request.sampling.logprobs is None
        next_block = (self.num_published + 1) * block_size
        self.check_from = min(next_block, self.max_total - 1) if is_plain else 0
