"""The live sequences of one engine: the waiting queue, the running queue with its rows, and the moves between
them.

Each move updates queue, row, KV blocks and status together, so that these always agree. The scheduler decides
which sequence moves and when; nothing here knows a token budget or a step.
"""

import hashlib
import heapq
import math
from bisect import insort
from collections.abc import Collection

from quire_server.core import policy
from quire_server.core.adapter_slots import AdapterSlots
from quire_server.core.block_hash import BlockHashChain, adapted_salt
from quire_server.core.config import SchedulerConfig
from quire_server.core.kv_cache_manager import KVCacheManager, PrefixMatch
from quire_server.core.policy import OutputLengthEstimator
from quire_server.core.request import Request
from quire_server.core.sequence import Sequence, Status
from quire_server.core.step import StartedRow

#: How much later, by virtual arrival, than a request that waits for a slot one may come and still go before
#: it, because its own adapter is on the device.
_ADAPTER_PATIENCE_SECONDS = 1.0


class WaitingQueue:
    """A heap of sequences by ``order``: new and preempted ones in one queue.

    A finished sequence stays in the heap and is skipped by ``first``; when such entries are the majority they
    are removed at once. So every operation is O(log n) amortised, and memory is O(n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Sequence]] = []
        self._num_stale = 0

    def push(self, sequence: Sequence) -> None:
        """Add a sequence whose status is WAITING."""
        heapq.heappush(self._heap, (sequence.order, sequence))

    def first(self) -> Sequence | None:
        """The sequence that goes next; it stays in the queue."""
        while self._heap and self._heap[0][1].status is not Status.WAITING:
            heapq.heappop(self._heap)
            self._num_stale -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Remove the sequence that ``first`` returned."""
        heapq.heappop(self._heap)

    def note_finished(self) -> None:
        """The status of one sequence in the queue is no longer WAITING."""
        self._num_stale += 1
        if 2 * self._num_stale > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
            self._num_stale = 0


class RunningQueue:
    """The sequences that have a row of the runner. ``sequences`` is sorted by ``order``, the last one is
    preempted first; only this class changes it.
    """

    def __init__(self, num_rows: int) -> None:
        self.sequences: list[Sequence] = []
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))  # the lowest is next

    @property
    def num_free_rows(self) -> int:
        """Rows without a sequence."""
        return len(self._free_rows)

    @property
    def is_full(self) -> bool:
        """Whether every row is taken."""
        return not self._free_rows

    def add(self, sequence: Sequence) -> None:
        """Give a sequence a row and insert it by its order."""
        sequence.row = self._free_rows.pop()
        insort(self.sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence and free its row."""
        self.sequences.remove(sequence)
        self._free_rows.append(sequence.row)

    def check(self) -> None:
        """Raise AssertionError when a row is lost or taken twice, or the order is broken."""
        rows = sorted([*self._free_rows, *(sequence.row for sequence in self.sequences)])
        assert rows == list(range(self._num_rows)), "rows"
        orders = list(map(_order, self.sequences))
        assert orders == sorted(orders), "order"


class RequestQueue:
    """Every live sequence by request id. ``waiting`` and ``running`` are for reading; change them through the
    methods here.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, eos_token_ids: Collection[int]) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running = RunningQueue(config.max_num_seqs)
        self.adapters = AdapterSlots(config.num_adapter_slots)
        self._parked: dict[str, Sequence] = {}  # waiting for a slot of their adapter, not in ``waiting``
        self._first_parked = math.inf  # the least virtual arrival of those whose adapter has no slot
        self.is_blocked = False  # the first waiting sequence did not fit, and nothing was freed since
        self.preemptions = 0
        self.waiting_blocks = 0  # KV blocks that waiting sequences are expected to need
        self._config = config
        self._kv = kv
        self._eos_ids = frozenset(eos_token_ids)
        self._output_lengths = OutputLengthEstimator()
        self._num_arrivals = 0

    def add(self, request: Request, adapter: int = 0, adapter_key: str = "") -> None:
        """Queue a request that fits into the limits. ``adapter_key``: of the adapter's name and content."""
        self._num_arrivals += 1
        self.sequences[request.request_id] = sequence = self._sequence(request, adapter, adapter_key)
        self.adapters.add_user(adapter)
        self.is_blocked = False
        self._push(sequence)

    def park(self, sequence: Sequence) -> bool:
        """Take the first waiting sequence out of the queue until a slot is free, if it waits for one."""
        if not self.waits_for_slot(sequence):
            return False
        if not self.adapters.is_running(sequence.adapter):
            self._first_parked = min(self._first_parked, sequence.order[0])
        self.waiting.pop()
        self._parked[sequence.request.request_id] = sequence
        return True

    def waits_for_slot(self, sequence: Sequence) -> bool:
        """Whether there is no slot for its adapter now, or that is the one which gives up its slot, to one
        that is before this sequence in the order by more than some patience: else that might wait for ever.
        """
        adapter = sequence.adapter
        if not adapter or not self.adapters.has_room(adapter):
            return adapter != 0
        is_behind = self._first_parked < sequence.order[0] - _ADAPTER_PATIENCE_SECONDS
        return is_behind and self.adapters.is_next_to_give(adapter)

    def _unpark(self) -> None:
        parked, self._parked = self._parked, {}
        self._first_parked = math.inf
        for sequence in parked.values():
            self.waiting.push(sequence)

    def start(self, sequence: Sequence, match: PrefixMatch) -> StartedRow:
        """Move the first waiting sequence to the running queue, with a row and its KV blocks."""
        self.waiting.pop()
        self.waiting_blocks -= self._expected_blocks(sequence)
        sequence.transition(Status.RUNNING)
        self.running.add(sequence)
        self._kv.start(sequence, match)
        sequence.update_check_from(self._config.block_size)
        return StartedRow(
            row=sequence.row,
            request_id=sequence.request.request_id,
            token_ids=tuple(sequence.tokens),
            num_prompt_tokens=len(sequence.request.prompt_token_ids),
            block_ids=tuple(sequence.block_ids),
            sampling=sequence.request.sampling,
            seed=sequence.seed,
            pooling=sequence.request.pooling,
            adapter_slot=self.adapters.acquire(sequence.adapter),
        )

    def preempt(self, sequence: Sequence) -> None:
        """Take row and blocks from a running sequence; it waits again.

        Its answer is at least as long as what was generated so far. Where a shorter one was expected
        (shortest job first), it moves back in the queue accordingly.
        """
        self.preemptions += 1
        self._kv.preempt(sequence)
        sequence.num_preemptions += 1
        request, (arrival, number) = sequence.request, sequence.order
        num_generated = len(sequence.tokens) - len(request.prompt_token_ids)
        virtual_arrival = policy.virtual_arrival(self._config.policy, request, num_generated)
        sequence.order = max(arrival, virtual_arrival), number
        self._wait_again(sequence)

    def restart(self, sequence: Sequence) -> None:
        """A block of its prefix could not be loaded from a lower tier: compute the sequence from the
        start.
        """
        self._kv.discard(sequence)
        self._wait_again(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and release all that it holds."""
        was_waiting = sequence.status is Status.WAITING
        self._kv.finish(sequence)
        if not was_waiting:
            self._leave_row(sequence)
        sequence.transition(Status.FINISHED)
        if was_waiting:
            if self._parked.pop(sequence.request.request_id, None) is None:
                self.waiting.note_finished()
            else:
                self._unpark()  # others may have waited for it alone
            self.waiting_blocks -= self._expected_blocks(sequence)
        self.is_blocked = False  # a sequence behind it may fit
        self.adapters.remove_user(sequence.adapter)
        del self.sequences[sequence.request.request_id]

    @property
    def growth_blocks(self) -> int:
        """KV blocks that running sequences are expected to need beside those they hold. O(running)."""
        return sum(
            max(self._expected_blocks(sequence) - len(sequence.block_ids), 0)
            for sequence in self.running.sequences
        )

    def blocks_of(self, request: Request) -> int:
        """KV blocks that a request is expected to need, once it has been added."""
        return self._num_blocks(self._expected_total(request))

    def learn_output_length(self, sequence: Sequence) -> None:
        """Feed the estimate of output lengths with an answer that is complete; health checks tell nothing."""
        if sequence.request.priority == policy.TOP_PRIORITY:
            return
        num_prompt_tokens = len(sequence.request.prompt_token_ids)
        length = len(sequence.tokens) - num_prompt_tokens
        self._output_lengths.learn(num_prompt_tokens, sequence.request.sampling.max_tokens, length)

    def _sequence(self, request: Request, adapter: int, adapter_key: str) -> Sequence:
        """The sequence of a new request: its place in the order, its seed, its limits."""
        sampling, prompt = request.sampling, request.prompt_token_ids
        expected = max(
            self._output_lengths.expect(len(prompt), sampling.max_tokens), len(request.output_token_ids)
        )
        eos_ids = frozenset[int]() if sampling.ignore_eos else self._eos_ids
        return Sequence(
            request=request,
            order=(policy.virtual_arrival(self._config.policy, request, expected), self._num_arrivals),
            seed=self._derived_seed(request.request_id) if sampling.seed is None else sampling.seed,
            stop_ids=eos_ids.union(sampling.stop_token_ids),
            max_total=self._max_total(request),
            # With a grammar the runner masks stop tokens before min_tokens, unless the grammar allows nothing
            # else; such a stop token counts.
            min_total=len(prompt) + (sampling.min_tokens if sampling.grammar is None else 0),
            expected_total=self._expected_total(request),
            tokens=[*prompt, *request.output_token_ids],
            block_hashes=BlockHashChain(adapted_salt(request.cache_salt, adapter_key)),
            adapter=adapter,
            num_prompt_logprobs=0 if sampling.prompt_logprobs is None else len(prompt) - 1,
        )

    def _derived_seed(self, request_id: str) -> int:
        """The seed of a request without one: differs between requests, and is the same in every run."""
        digest = hashlib.sha256(f"{self._config.seed}:{request_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)

    def _wait_again(self, sequence: Sequence) -> None:
        self._leave_row(sequence)
        sequence.transition(Status.WAITING)
        sequence.update_expected_total()
        self._push(sequence)

    def _push(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)
        self.waiting_blocks += self._expected_blocks(sequence)

    def _expected_blocks(self, sequence: Sequence) -> int:
        return self._num_blocks(sequence.expected_total)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def _max_total(self, request: Request) -> int:
        return min(len(request.prompt_token_ids) + request.sampling.max_tokens, self._config.max_model_len)

    def _expected_total(self, request: Request) -> int:
        num_prompt_tokens = len(request.prompt_token_ids)
        expected = self._output_lengths.expect(num_prompt_tokens, request.sampling.max_tokens)
        expected = max(expected, len(request.output_token_ids) + 1)
        return min(num_prompt_tokens + math.ceil(expected), self._max_total(request))

    def _leave_row(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.is_blocked = False
        if self.adapters.release(sequence.adapter):
            self._unpark()


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
