"""Who gets what the budget still holds after the single tokens: prompts that run, and those that wait.

Called by the scheduler once for each step, after preemption and growth. Both stand in one order. Running
prompts go first, but for one kind: whoever may interrupt (see ``displacement``) starts before the next chunk
of a prompt that stands behind it, or a long prompt would hold up what is urgent for as long as it takes. The
chunk gets what is left, its row and its blocks stay its own. Decides only who starts, and with how much.
"""

from collections.abc import Callable

from quire_server.core import displacement
from quire_server.core.handover import Turns
from quire_server.core.kv_manager import KVManager
from quire_server.core.lifecycle import Lifecycle
from quire_server.core.limits import Batching, SchedulerConfig
from quire_server.core.sequence import Sequence

_MAX_PASSED = 4  # that wait for the disk: each is looked up again in every step


class Admission:
    """Starts waiting sequences through ``life``; those that can never start go to ``give_up``."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        life: Lifecycle,
        give_up: Callable[[Sequence, int], None],
    ) -> None:
        self._config = config
        self._kv = kv
        self._life = life
        self._give_up = give_up
        self._is_closed = False  # static batching: the batch has begun, and nobody joins

    def deal(self, turns: Turns, prompts: list[Sequence], *, admits: bool) -> int:
        """Give chunks to running prompts, in their order, and start waiting sequences; returns what is left
        of the budget.
        """
        budget = self._config.token_budget - len(turns.singles)
        for sequence in prompts:
            if admits and self._goes_before(self._life.waiting.first(), sequence):
                budget = self._admit(budget, turns, sequence)
            if budget == 0:
                break
            turns.chunks.append((sequence, min(budget, len(sequence.tokens) - sequence.num_computed)))
            budget -= turns.chunks[-1][1]
        return self._admit(budget, turns, None) if admits else budget

    def _admit(self, budget: int, turns: Turns, behind: Sequence | None) -> int:
        """Start waiting sequences in their order, as long as budget, rows and blocks last; with ``behind``
        only those that go before it. Nobody overtakes, but for those whom the first ones let pass while they
        wait for the disk.
        """
        life, running = self._life, self._life.running
        fetching: list[Sequence] = []
        self._is_closed &= bool(running.sequences)
        while budget > 0 and not (life.is_blocked or self._is_closed):
            sequence = life.waiting.first()
            if sequence is None or running.num_free_rows <= len(fetching):
                break
            if behind is not None and not self._goes_before(sequence, behind):
                break
            if (match := self._kv.match(sequence)) is None:
                # A part of its prefix is on its way from the disk. It keeps its place, and a row and blocks.
                if self._config.batching is Batching.STATIC or len(fetching) == _MAX_PASSED:
                    break
                life.waiting.pop()
                fetching.append(sequence)
                continue
            lacking = len(sequence.tokens) - match.num_cached
            if lacking > budget and not self._config.enable_chunked_prefill:
                budget = 0
                break
            alone = not (running.sequences or fetching)
            if not self._kv.fits(match, alone=alone, reclaimed=-sum(map(self._num_blocks, fetching))):
                if alone:
                    # It lost its place with more tokens than the whole cache holds.
                    self._give_up(sequence, self._num_blocks(sequence))
                    continue
                life.is_blocked = not fetching
                break
            turns.started.append(life.start(sequence, match))
            budget -= self._turn(sequence, min(budget, lacking), turns)
        for sequence in fetching:
            life.waiting.push(sequence)
        # Static: whoever the budget kept waiting may still join; later nobody.
        self._is_closed |= self._config.batching is Batching.STATIC and budget > 0
        return budget

    def _turn(self, sequence: Sequence, num_tokens: int, turns: Turns) -> int:
        """A newcomer decodes only when the cache holds all the rest; one token of more is a chunk."""
        if sequence.num_computed + 1 == len(sequence.tokens):
            turns.newcomers.append(sequence)
        else:
            turns.chunks.append((sequence, num_tokens))
        return num_tokens

    def _goes_before(self, waiting: Sequence | None, running: Sequence) -> bool:
        return (
            waiting is not None
            and waiting.order < running.order
            and displacement.may_interrupt(waiting, self._config)
        )

    def _num_blocks(self, sequence: Sequence) -> int:
        return -(-len(sequence.tokens) // self._config.block_size)
