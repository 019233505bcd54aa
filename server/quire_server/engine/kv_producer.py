"""The role of a producer: computes prefixes that consumers ask for, and holds their KV blocks until they were
read.

A prefix is a request of one token, whose answer is not read. When it has ended its blocks are in the prefix
cache, and are kept there.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator

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
        self._jobs: dict[str, PrefillJob] = {}  # that are computed, by request id
        self._held: dict[bytes, PrefixBlocks] = {}  # by generation
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
            self._scheduler.release_prefix(self._held.pop(hold.reference.generation))
            logger.debug("held KV blocks are free", extra={"why": hold.state.value})
        for request_id in [name for name, job in self._jobs.items() if job.is_abandoned]:
            del self._jobs[request_id]
            self._scheduler.abort(request_id)
        while not self._inbox.empty():
            if (request := self._take(self._inbox.get())) is not None:
                yield request, 0
        if self._server is not None:
            self._server.load = self._scheduler.num_running + self._scheduler.num_waiting

    def take(self, events: StepEvents) -> None:
        """Hold the blocks of prefixes that are computed now, before anything overwrites them."""
        for event in events.events if self._jobs else ():
            if event.finish_reason is None or (job := self._jobs.pop(event.request_id, None)) is None:
                continue
            if event.error is not None:
                job.finish(event.error)
            elif not job.is_abandoned:
                blocks = self._scheduler.kv.hold(job.prefill.tokens, job.prefill.salt)
                if not self._hold(job, blocks):
                    job.finish(_LOST)

    def stats(self) -> TransferStats:
        """Gauges and counters."""
        return TransferStats(held=len(self._held), computing=len(self._jobs))

    def _submit(self, job: PrefillJob) -> None:
        """On a thread of the listener."""
        self._inbox.put(job)
        self._wake()

    def _take(self, job: PrefillJob) -> Request | None:
        """The request that computes a prefix; None if it is cached, or not to be computed."""
        prefill, size = job.prefill, self._scheduler.config.block_size
        if job.is_abandoned or self._hold(job, self._scheduler.hold_prefix(prefill.tokens, prefill.salt)):
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
        if len(prefill.tokens) % size or max(prefill.tokens) >= self._vocab_size:
            why = "the prompt has no whole blocks, or no tokens of this model"
        if why is not None:
            job.finish(why)
            return None
        self._jobs[request.request_id] = job
        return request

    def _hold(self, job: PrefillJob, blocks: PrefixBlocks | None) -> bool:
        """Give a job its blocks, if there are any."""
        if blocks is None:
            return False
        reference = self._holds.add(blocks.hashes.digests[-1], blocks.block_ids)
        self._held[reference.generation] = blocks
        job.finish(reference)
        return True
