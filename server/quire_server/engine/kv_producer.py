"""The role of a producer: computes prefixes that consumers ask for, and holds their KV blocks until they were
read.

A prefix is a request of one token, whose answer is not read. When it has ended its blocks are in the prefix
cache, and are kept there. Those of a GPU are copied to the host, and kept there: a prefix begins when the
host has room for it, and waits until then.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire_server.core.config import rejection_reason
from quire_server.core.kv_cache_manager import PrefixBlocks
from quire_server.core.policy import MAX_PRIORITY, MIN_PRIORITY
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler
from quire_server.core.stats import TransferStats
from quire_server.core.step import StepEvents
from quire_server.engine.kv_connector import KVConnector
from quire_server.kv_transfer.holds import SharedHolds
from quire_server.kv_transfer.server import PrefillJob, TransferServer

logger = logging.getLogger(__name__)

_LOST = "the blocks are no longer cached"


@dataclass(eq=False, slots=True)
class _Prefix:
    """One that is computed, copied or held. ``slots``: on the host, where blocks of a GPU are read;
    ``copied_at``: the number of committed steps with which they are there.
    """

    job: PrefillJob
    slots: list[int]
    blocks: PrefixBlocks | None = None
    copied_at: int = 0


class KVProducer(KVConnector):
    """``listen`` makes the listener, given what takes its jobs and what wakes the engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        holds: SharedHolds,
        vocab_size: int,
        listen: Callable[[Callable[[PrefillJob], None], Callable[[], None]], TransferServer],
    ) -> None:
        self._scheduler = scheduler
        self._holds = holds
        self._vocab_size = vocab_size
        self._listen = listen
        self._server: TransferServer | None = None
        self._inbox: queue.SimpleQueue[PrefillJob] = queue.SimpleQueue()
        self._waiting: deque[PrefillJob] = deque()  # for slots
        self._computing: dict[str, _Prefix] = {}  # by request id
        self._copying: list[_Prefix] = []
        self._held: dict[bytes, _Prefix] = {}  # by generation
        self._wake: Callable[[], None] = lambda: None
        self._num_jobs = 0

    def start(self, wake: Callable[[], None]) -> None:
        """Listen for consumers."""
        self._wake = wake
        self._server = self._listen(self._submit, wake)
        logger.info("listening for consumers of KV blocks", extra={"port": self._server.port})

    def advance(self) -> Iterator[tuple[Request, int]]:
        """Take new jobs, drop abandoned ones, free the blocks of holds that have ended."""
        for hold in self._holds.take_ended():
            self._release(self._held.pop(hold.reference.generation))
            logger.debug("held KV blocks are free", extra={"why": hold.state.value})
        for request_id in [name for name, prefix in self._computing.items() if prefix.job.is_abandoned]:
            self._scheduler.abort(request_id)
            self._release(self._computing.pop(request_id))
        self._hold_copied()
        while not self._inbox.empty():
            self._waiting.append(self._inbox.get())
        while self._waiting and (prefix := self._begin(self._waiting[0])) is not None:
            self._waiting.popleft()
            if (request := self._request(prefix)) is not None:
                yield request, 0
        if self._server is not None:
            num_requests = self._scheduler.num_running + self._scheduler.num_waiting
            self._server.load = num_requests + len(self._waiting)

    def take(self, events: StepEvents) -> None:
        """Hold the blocks of prefixes that are computed now, before anything overwrites them."""
        self._hold_copied()
        for event in events.events if self._computing else ():
            if event.finish_reason is None or (prefix := self._computing.pop(event.request_id, None)) is None:
                continue
            prefill = prefix.job.prefill
            if event.error is not None:
                self._fail(prefix, event.error)
            elif prefix.job.is_abandoned:
                self._release(prefix)
            elif not self._hold(prefix, self._scheduler.kv.hold(prefill.tokens, prefill.salt)):
                self._fail(prefix, _LOST)

    def stats(self) -> TransferStats:
        """Gauges and counters."""
        num_computing = len(self._computing) + len(self._copying) + len(self._waiting)
        return TransferStats(held=len(self._held), computing=num_computing)

    def _submit(self, job: PrefillJob) -> None:
        """On a thread of the listener."""
        self._inbox.put(job)
        self._wake()

    def _begin(self, job: PrefillJob) -> _Prefix | None:
        """A prefix with its slots, if blocks are staged; None while there are not enough."""
        kv, num_blocks = self._scheduler.kv, len(job.prefill.tokens) // self._scheduler.config.block_size
        if not kv.stages or job.is_abandoned or num_blocks > kv.num_staging_slots:
            return _Prefix(job, [])
        slots = kv.take_slots(num_blocks)
        return _Prefix(job, slots) if len(slots) == num_blocks else None

    def _request(self, prefix: _Prefix) -> Request | None:
        """The request that computes a prefix; None if it is cached, or not to be computed."""
        job, prefill, kv = prefix.job, prefix.job.prefill, self._scheduler.kv
        if job.is_abandoned:
            self._release(prefix)
            return None
        num_blocks, rest = divmod(len(prefill.tokens), self._scheduler.config.block_size)
        if kv.stages and num_blocks > kv.num_staging_slots:
            room = f"{kv.num_staging_slots} blocks: raise --kv-staging-bytes"
            self._fail(prefix, f"the prompt has {num_blocks} blocks, and its host has room for {room}")
            return None
        if self._hold(prefix, self._scheduler.hold_prefix(prefill.tokens, prefill.salt)):
            return None
        self._num_jobs += 1
        request = Request(
            f"prefix-{self._num_jobs}",
            prefill.tokens,
            SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            arrival=time.monotonic(),
            priority=min(max(prefill.priority, MIN_PRIORITY), MAX_PRIORITY),
            cache_salt=prefill.salt,
        )
        why = rejection_reason(request, self._scheduler.config)
        if rest or max(prefill.tokens) >= self._vocab_size:
            why = "the prompt has no whole blocks, or no tokens of this model"
        if why is not None:
            self._fail(prefix, why)
            return None
        self._computing[request.request_id] = prefix
        return request

    def _hold(self, prefix: _Prefix, blocks: PrefixBlocks | None) -> bool:
        """Give a job its blocks, if there are any, once they are where they are read."""
        if blocks is None:
            return False
        prefix.blocks = blocks
        if prefix.slots:
            prefix.copied_at = self._scheduler.stage_prefix(blocks, prefix.slots)
            self._copying.append(prefix)
        else:
            self._give(prefix, blocks, blocks.block_ids)
        return True

    def _hold_copied(self) -> None:
        """Give jobs what was copied to the host; the blocks of the GPU are free then."""
        num_committed = self._scheduler.num_committed
        copied = [prefix for prefix in self._copying if num_committed >= prefix.copied_at]
        for prefix in copied:
            self._copying.remove(prefix)
            blocks, prefix.blocks = prefix.blocks, None
            assert blocks is not None
            self._scheduler.release_prefix(blocks)
            self._give(prefix, blocks, prefix.slots)

    def _give(self, prefix: _Prefix, blocks: PrefixBlocks, places: list[int]) -> None:
        """Blocks, or slots, are held for a job from now on."""
        reference = self._holds.add(blocks.hashes.digests[-1], places)
        self._held[reference.generation] = prefix
        prefix.job.finish(reference)

    def _fail(self, prefix: _Prefix, why: str) -> None:
        self._release(prefix)
        prefix.job.finish(why)

    def _release(self, prefix: _Prefix) -> None:
        """Nothing reads its blocks, and none are copied."""
        if prefix.blocks is not None:
            self._scheduler.release_prefix(prefix.blocks)
        self._scheduler.kv.free_slots(prefix.slots)
