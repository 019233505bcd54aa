"""The role of a consumer: fetches the KV blocks of long prompts from a producer, before they are scheduled.

A thread a transfer waits for the network; the engine's thread owns the blocks and the state. A request whose
transfer fails in any way, or takes too long, is scheduled as if there were no producer: it is computed here,
and never fetched again. A request that lacks what is being fetched for another one waits for that, so that
equal prompts that come together, as the answers of one request, are fetched once. Blocks of a transfer stay
reserved until its thread has stopped writing to them. Those of a GPU are written to by a step, from the
memory of the host that the thread has read to.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from quire_server.core.config import rejection_reason
from quire_server.core.kv_cache_manager import PrefixBlocks
from quire_server.core.request import Request
from quire_server.core.scheduler import Scheduler
from quire_server.core.stats import TransferStats
from quire_server.core.step import StepEvents
from quire_server.core.transfer import (
    Reference,
    RefusedError,
    TransferError,
    TransferState,
    changed,
    prefix_blocks,
    prefix_digest,
)
from quire_server.engine.kv_connector import KVConnector
from quire_server.kv_transfer import client
from quire_server.kv_transfer.blocks import KVBlocks
from quire_server.kv_transfer.channel import Channel
from quire_server.kv_transfer.client import Producers
from quire_server.kv_transfer.frames import Prefill

logger = logging.getLogger(__name__)

MAX_TRANSFERS = 16  # at a time; further prompts are computed here
PREFILL_SECONDS = 30.0  # within which a producer has to have computed a prefix
_ROOM_SECONDS = 5.0  # within which this side has to have room for it
_CONNECT_SECONDS = 3.0  # within which a producer has to be found

_OPEN = {TransferState.QUEUED, TransferState.RESERVED, TransferState.READING}  # not cancelled


@dataclass(eq=False)
class Transfer:
    """One request whose prefix is fetched. Its thread sets only ``channel``."""

    request: Request
    tokens: tuple[int, ...]  # of the prefix, whole blocks
    began_at: float
    give_up_at: float
    state: TransferState = TransferState.QUEUED
    reference: Reference | None = None
    blocks: PrefixBlocks | None = None
    num_steps: int = 0  # that have to be committed before it goes on
    num_fetched_tokens: int = 0
    channel: Channel | None = None
    followers: list[Request] = field(default_factory=list)  # that lack what it fetches
    reserved: queue.SimpleQueue[PrefixBlocks | None] = field(default_factory=queue.SimpleQueue)


class KVConsumer(KVConnector):
    """Used by the engine's thread; only ``_run`` is on threads of its own."""

    def __init__(
        self, scheduler: Scheduler, producers: Producers, blocks: KVBlocks, local_prefill_below: int
    ) -> None:
        self._scheduler = scheduler
        self._producers = producers
        self._blocks = blocks
        self._local_prefill_below = local_prefill_below
        self._transfers: dict[str, Transfer] = {}  # whose requests are kept here
        self._threads: set[Transfer] = set()  # whose thread has not ended
        self._copying: list[Transfer] = []  # what is on the host, to the device
        self._leaders: dict[str, Transfer] = {}  # by the request ids of their followers
        self._released: list[Request] = []  # followers whose leader has ended, and not by a failure
        self._inbox: queue.SimpleQueue[tuple[Transfer, Reference | str | None]] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._succeeded = self._failed = self._num_blocks = 0
        self._has_failed = False  # the last transfer

    def start(self, wake: Callable[[], None]) -> None:
        """Threads wake the engine when something has come."""
        self._wake = wake

    def add(self, request: Request) -> bool:
        """Fetch the prefix of a long prompt that is not cached here."""
        prompt, config = request.prompt_token_ids, self._scheduler.config
        num_blocks = prefix_blocks(len(prompt), config.block_size)
        if self._scheduler.kv.stages:  # of a longer one the rest is computed here
            num_blocks = min(num_blocks, self._scheduler.kv.num_staging_slots)
        if len(prompt) < self._local_prefill_below or not num_blocks:
            return False
        if request.sampling.prompt_logprobs is not None:
            return False
        tokens = prompt[: num_blocks * config.block_size]
        num_cached = self._scheduler.kv.num_cached_tokens(tokens, request.cache_salt)
        if len(prompt) - num_cached < self._local_prefill_below or num_cached == len(tokens):
            return False
        if rejection_reason(request, config):
            return False
        if (leader := self._leader(request, tokens, num_cached)) is not None:
            leader.followers.append(request)
            self._leaders[request.request_id] = leader
            return True
        if len(self._threads) >= MAX_TRANSFERS:
            return False
        now = time.monotonic()
        transfer = Transfer(request, tokens, now, now + PREFILL_SECONDS + _ROOM_SECONDS)
        self._transfers[request.request_id] = transfer
        self._threads.add(transfer)
        threading.Thread(target=self._run, args=(transfer,), name="kv-read", daemon=True).start()
        return True

    def _leader(self, request: Request, tokens: tuple[int, ...], num_cached: int) -> Transfer | None:
        """A transfer that brings at least half of what a request lacks, and is no less urgent."""
        size = self._scheduler.config.block_size
        num_enough = num_cached + -(-(len(tokens) - num_cached) // (2 * size)) * size
        for transfer in self._transfers.values():
            leader = transfer.request
            is_usable = leader.cache_salt == request.cache_salt and leader.priority <= request.priority
            if is_usable and transfer.tokens[:num_enough] == tokens[:num_enough]:
                return transfer
        return None

    def remove(self, request_id: str) -> None:
        """Stop the transfer of a request whose client is gone. Blocks are freed when its thread has ended."""
        self._released = [each for each in self._released if each.request_id != request_id]
        if (leader := self._leaders.pop(request_id, None)) is not None:
            leader.followers = [each for each in leader.followers if each.request_id != request_id]
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None:
            is_reading = transfer.state is TransferState.READING
            self._released += self._take_followers(transfer)
            self._end(transfer, TransferState.CANCELLING if is_reading else TransferState.FREED)

    def requests(self) -> Sequence[Request]:
        """Those whose prefix is being fetched, by themselves or by another one."""
        transfers = self._transfers.values()
        return [each for one in transfers for each in (one.request, *one.followers)] + self._released

    def advance(self) -> Iterator[tuple[Request, int]]:
        """Take in what the threads report; yields requests whose prefix is here, or has to be computed."""
        while not self._inbox.empty():
            transfer, report = self._inbox.get()
            if isinstance(report, Reference):
                transfer.reference = report
                transfer.give_up_at = time.monotonic() + _ROOM_SECONDS
            else:
                for request in self._ended(transfer, report):
                    yield request, transfer.num_fetched_tokens
        yield from self._copied()
        now = time.monotonic()
        for transfer in list(self._transfers.values()):
            if transfer.state is TransferState.QUEUED and transfer.reference is not None:
                self._reserve(transfer)
            if transfer.state is TransferState.RESERVED:
                self._read_after_steps(transfer)
            is_late = now >= transfer.give_up_at or (
                transfer.channel is None and now >= transfer.began_at + _CONNECT_SECONDS
            )
            if transfer.state is TransferState.QUEUED and is_late:
                for request in self._compute_here(transfer, "it took too long"):
                    yield request, 0
        released, self._released = self._released, []
        for request in released:
            if not self.add(request):
                yield request, 0

    def take(self, events: StepEvents) -> None:
        """Go on with what the step has copied, even if the engine has nothing else to do."""
        if self._copying:
            self._wake()

    @property
    def is_degraded(self) -> bool:
        """Whether the last prefix that was to be fetched was computed here instead."""
        return self._has_failed

    def stats(self) -> TransferStats:
        """Gauges and counters."""
        return TransferStats(self._succeeded, self._failed, self._num_blocks)

    # ---------------------------------------------------------------- the engine's thread

    def _reserve(self, transfer: Transfer) -> None:
        """Take blocks, if there is room."""
        transfer.blocks = self._scheduler.reserve_prefix(transfer.tokens, transfer.request.cache_salt)
        if transfer.blocks is not None:
            transfer.state = changed(transfer.state, TransferState.RESERVED)
            transfer.num_steps = self._scheduler.num_scheduled

    def _read_after_steps(self, transfer: Transfer) -> None:
        """Let the thread read, once no step in flight can write to its blocks: with several stages there are
        steps whose requests are gone. No step but its own ever writes to the host.
        """
        if self._scheduler.kv.stages or self._scheduler.num_committed >= transfer.num_steps:
            transfer.state = changed(transfer.state, TransferState.READING)
            transfer.reserved.put(transfer.blocks)

    def _ended(self, transfer: Transfer, failure: str | None) -> Sequence[Request]:
        """The thread of a transfer has ended; returns the requests that are to be scheduled now."""
        self._threads.remove(transfer)
        if failure is None and transfer.state is TransferState.READING:
            assert transfer.blocks is not None
            transfer.state = changed(transfer.state, TransferState.VERIFIED)
            if transfer.blocks.slots:
                transfer.num_steps = self._scheduler.unstage_prefix(transfer.blocks)
                self._copying.append(transfer)
                return ()
            return self._published(transfer, transfer.blocks)
        if transfer.blocks is not None:
            self._scheduler.release_prefix(transfer.blocks)
        if transfer.state is TransferState.CANCELLING:
            transfer.state = changed(transfer.state, TransferState.FREED)
        if transfer.state in (TransferState.QUEUED, TransferState.READING):
            return self._compute_here(transfer, failure or "it ended")
        return ()

    def _copied(self) -> Iterator[tuple[Request, int]]:
        """Requests whose prefix is on the device now."""
        num_committed = self._scheduler.num_committed
        for transfer in [each for each in self._copying if num_committed >= each.num_steps]:
            self._copying.remove(transfer)
            assert transfer.blocks is not None
            for request in self._published(transfer, transfer.blocks):
                yield request, transfer.num_fetched_tokens

    def _published(self, transfer: Transfer, blocks: PrefixBlocks) -> Sequence[Request]:
        """The blocks have their contents; returns the request, if its client has not gone meanwhile. Those
        that waited for it have less to fetch now, or nothing.
        """
        num_fetched = len(blocks.block_ids) - blocks.num_cached
        transfer.num_fetched_tokens = num_fetched * self._scheduler.config.block_size
        self._num_blocks += num_fetched
        self._scheduler.kv.publish_reserved(blocks)
        self._scheduler.release_prefix(blocks)
        if transfer.state is not TransferState.VERIFIED:
            return ()
        transfer.state = changed(transfer.state, TransferState.RUNNING)
        self._succeeded += 1
        self._has_failed = False
        del self._transfers[transfer.request.request_id]
        self._released += self._take_followers(transfer)
        return (transfer.request,)

    def _compute_here(self, transfer: Transfer, why: str) -> Sequence[Request]:
        self._end(transfer, TransferState.LOCAL_PREFILL)
        self._failed += 1
        self._has_failed = True
        del self._transfers[transfer.request.request_id]
        facts = {"request_id": transfer.request.external_id, "why": why}
        logger.info("a prefix is computed here: no producer gave it", extra=facts)
        return (transfer.request, *self._take_followers(transfer))

    def _take_followers(self, transfer: Transfer) -> Sequence[Request]:
        """Those that wait for a transfer wait no longer."""
        followers, transfer.followers = transfer.followers, []
        for request in followers:
            del self._leaders[request.request_id]
        return followers

    def _end(self, transfer: Transfer, state: TransferState) -> None:
        """Change the state, and make the thread stop."""
        transfer.state = changed(transfer.state, state)
        transfer.reserved.put(None)
        if (channel := transfer.channel) is not None:
            channel.interrupt()

    # ---------------------------------------------------------------- a transfer's thread

    def _run(self, transfer: Transfer) -> None:
        failure: str | None = "the thread of the transfer failed"
        try:
            self._fetch(transfer)
            failure = None
        except TransferError as error:
            failure = str(error)
        finally:
            self._inbox.put((transfer, failure))
            self._wake()

    def _fetch(self, transfer: Transfer) -> None:
        request, size = transfer.request, self._scheduler.config.block_size
        channel, address = self._producers.connect()
        transfer.channel = channel
        unread: list[int] = []
        try:
            if transfer.state not in _OPEN:
                raise RefusedError("the client is gone, or waits no longer")
            wanted = Prefill(request.priority, request.cache_salt, transfer.tokens)
            prefix = prefix_digest(transfer.tokens, request.cache_salt, size)
            reference = client.prefill(channel, wanted, prefix, PREFILL_SECONDS)
            self._inbox.put((transfer, reference))
            self._wake()
            blocks = transfer.reserved.get()
            if blocks is None:
                raise RefusedError("this side had no room, or the client is gone")
            first = blocks.num_cached
            unread = blocks.slots or blocks.block_ids[first:]
            if unread:  # else an equal prompt was faster
                client.read(channel, reference, first, self._blocks, unread)
            unread = []
        except TransferError as error:
            if not isinstance(error, RefusedError) and transfer.state in _OPEN:
                self._producers.failed(address, str(error))
            raise
        finally:
            self._blocks.clear(unread)
            channel.close()
