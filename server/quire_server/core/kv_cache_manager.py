"""The KV blocks of sequences: prefix cache look-up, whether the rest fits, and the block table from start to
finish.

Combines the GPU's ``block_pool`` with the lower tiers of ``kv_offload``: a block that is loaded from a lower
tier is treated like one that the step computes, so it is published after the step. The scheduler decides
which sequence goes first and which one is preempted; nothing here knows an order.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple

from quire_server.core.block_hash import ROOT, BlockHashChain, Content
from quire_server.core.block_pool import BlockPool
from quire_server.core.config import PreemptionMode, SchedulerConfig
from quire_server.core.kv_offload import OffloadManager
from quire_server.core.sequence import Sequence
from quire_server.core.stats import KVStats
from quire_server.core.step import Copies, StepResult


class PrefixMatch(NamedTuple):
    """The cached prefix of a waiting sequence, and how many blocks the rest needs."""

    hits: dict[int, int]  # index in the block table -> block on the device, to be shared
    loads: dict[int, int]  # index in the block table -> host slot, to be copied to a new block
    numbers: list[int]  # of the contents in the leading hits
    num_new: int
    num_cached: int  # tokens that need not be computed


@dataclass(slots=True, eq=False)
class PrefixBlocks:
    """The blocks of a prefix that is read by or from another server; no sequence uses them because of it.

    The first ``num_cached`` hold their content; the others get theirs while the prefix is transferred.
    ``slots``: where on the host those are that are read, if transfers do not reach the device.
    """

    tokens: tuple[int, ...]  # of whole blocks
    hashes: BlockHashChain
    block_ids: list[int]
    num_cached: int
    slots: list[int] = field(default_factory=list)


class KVCacheManager:
    """Every method is O(blocks of the sequence it is given), except ``reset`` and ``check``."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self._block_size = config.block_size
        self._caching = config.enable_prefix_caching
        self._num_staging_slots = config.num_staging_slots
        assert not (config.num_staging_slots and config.num_host_slots), "the slots are for one of both"
        self._swapping = config.preemption_mode is PreemptionMode.SWAP and not config.num_staging_slots
        self._free_block_reserve = int(config.num_blocks * config.free_block_reserve)
        self._clock = clock
        self._offload = OffloadManager(
            config.num_host_slots or config.num_staging_slots, config.num_disk_slots
        )
        self._has_offload = config.num_host_slots > 0
        self._pool = BlockPool(
            config.num_blocks,
            max_pinned=int(config.num_blocks * config.max_pinned_share),
            on_evict=self._offload.demote if self._has_offload else _drop,
        )
        self._last_number = ROOT
        self._transferred: set[PrefixBlocks] = set()  # what ``hold`` and ``reserve`` returned
        self._staged: set[int] = set()  # what ``take_slots`` returned
        self._queries = self._hits = self._pins_refused = self._swaps = 0

    @property
    def utilization(self) -> float:
        """Share of blocks in use or pinned; cached ones count as free."""
        return 1 - self._pool.num_free / self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that ``append_block`` could return now."""
        return self._pool.num_free

    @property
    def has_spare(self) -> bool:
        """Whether more than the reserve is free, so that a block may be used for something optional."""
        return self._pool.num_free > self._free_block_reserve

    def stats(self) -> KVStats:
        """Gauges and counters."""
        host, disk = self._offload.stats()
        return KVStats(
            self._queries,
            self._hits,
            self._pool.evictions,
            self._pool.num_pinned,
            self._pins_refused,
            self._swaps,
            self._offload.corrupt,
            *host,
            *disk,
            self._offload.disk_failed,
        )

    # ---------------------------------------------------------------- admission

    def match(self, sequence: Sequence) -> PrefixMatch | None:
        """The longest cached prefix, at most all tokens but the last. Takes no block. None: a part of the
        prefix is being read from the disk; ask again after the next step.

        While prompt logprobs are missing the cache is not used: they exist only for positions that are
        computed.
        """
        is_cacheable = self._caching and sequence.num_prompt_logprobs_sent >= sequence.num_prompt_logprobs
        found = self._find_prefix(sequence) if is_cacheable else ({}, {}, [])
        if found is None:
            return None
        hits, loads, numbers = found
        num_cached = (len(hits) + len(loads)) * self._block_size
        if sequence.num_swapped_tokens > num_cached:
            num_cached = sequence.num_swapped_tokens
            loads = {index: slot for index, slot in enumerate(sequence.swap_slots) if index not in hits}
        num_new = -(-len(sequence.tokens) // self._block_size) - len(hits)
        return PrefixMatch(hits, loads, numbers, num_new, num_cached)

    def fits(self, match: PrefixMatch, *, is_alone: bool, num_reclaimed: int = 0) -> bool:
        """Whether there are enough blocks, once ``num_reclaimed`` more are free. Beside other sequences the
        reserve stays free, to avoid preemptions; for a sequence that is alone even pins are released.
        """
        self.expire_pins()
        num_spare = self._pool.num_free_after(match.hits.values(), match.num_new) + num_reclaimed
        if is_alone:
            return num_spare >= 0 or (
                self.release_pins() and self._pool.num_free_after(match.hits.values(), match.num_new) >= 0
            )
        return num_spare >= self._free_block_reserve

    def num_reclaimable(self, sequence: Sequence, released: Counter[int], match: PrefixMatch) -> int:
        """Blocks that preempting the sequence would free, after the tables counted in ``released`` (to which
        its table is added). Blocks that the match shares anyway do not count.
        """
        hits = set(match.hits.values())
        return sum(block_id not in hits for block_id in self._pool.freed_by(sequence.block_ids, released))

    def start(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Build the block table. ``match`` must be current, and must fit."""
        if sequence.num_cached_tokens is None:
            # What was fetched for this very request was computed for it, only elsewhere.
            sequence.num_cached_tokens = max(match.num_cached - sequence.num_fetched_tokens, 0)
            self._queries += len(sequence.tokens)
            self._hits += sequence.num_cached_tokens
        self._pool.share(match.hits.values())  # before any allocation, which might evict them
        for slot in match.loads.values():  # before any eviction, which might use these slots
            self._offload.lock(slot)
        for index in range(len(match.hits) + match.num_new):
            block_id = match.hits[index] if index in match.hits else self._pool.allocate()
            assert block_id is not None, "the match does not fit"
            if index in match.loads:
                self._offload.load(match.loads[index], block_id)
            sequence.block_ids.append(block_id)
        sequence.capacity = len(sequence.block_ids) * self._block_size
        sequence.num_computed, sequence.num_published = match.num_cached, len(match.numbers)
        sequence.block_hashes.numbers[:] = match.numbers
        sequence.has_waited_for_disk = False
        self._release_swap_slots(sequence, after_step=True)

    # ---------------------------------------------------------------- steps

    def append_block(self, sequence: Sequence) -> int | None:
        """Append a block to the table; None when no block is free."""
        self.expire_pins()
        block_id = self._pool.allocate()
        if block_id is not None:
            sequence.block_ids.append(block_id)
            sequence.capacity += self._block_size
        return block_id

    def expire_pins(self) -> None:
        """Release the pins whose time is over. Looking for blocks does so; an idle engine looks for none."""
        if self._pool.num_pinned:
            self._pool.expire(self._clock())

    def release_pins(self) -> bool:
        """End explicit prompt caching, rather than fail a request; False when nothing was pinned."""
        return self._pool.release_pins()

    def take_copies(self) -> Copies | None:
        """The copies between tiers that belong to the step that was just planned. Once for each step."""
        return self._offload.take_copies()

    def apply_copy_outcome(self, result: StepResult) -> frozenset[int]:
        """Take in which copies failed. Returns blocks whose content could not be loaded: sequences with them
        have to be computed again.
        """
        if result.copied is None:
            return frozenset()
        self._offload.apply_outcome(result.copied)
        return frozenset(result.copied.failed)

    def publish(self, sequence: Sequence) -> None:
        """Enter the full blocks that were computed since the last call into the prefix cache."""
        num_full, hashes, size = (
            sequence.num_computed // self._block_size,
            sequence.block_hashes,
            self._block_size,
        )
        if not self._caching:
            sequence.num_published = num_full
            return
        for index in range(sequence.num_published, num_full):
            tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
            self._publish_block(sequence.block_ids[index], hashes, index, tokens)
        sequence.num_published = num_full

    # ---------------------------------------------------------------- transfers

    @property
    def has_transfers(self) -> bool:
        """Whether blocks are kept for transfers, all of which come back within a bounded time."""
        return bool(self._transferred)

    def num_cached_tokens(self, tokens: Tokens[int], salt: str) -> int:
        """How many of these tokens, in whole blocks, the device has."""
        return len(self._cached_blocks(tokens, BlockHashChain(salt))) * self._block_size

    def hold(self, tokens: tuple[int, ...], salt: str) -> PrefixBlocks | None:
        """Keep the cached blocks of a prefix from being overwritten; None unless all of them are cached."""
        hashes = BlockHashChain(salt)
        block_ids = self._cached_blocks(tokens, hashes)
        if len(block_ids) * self._block_size < len(tokens):
            return None
        self._pool.share(block_ids)
        held = PrefixBlocks(tokens, hashes, block_ids, len(block_ids))
        self._transferred.add(held)
        return held

    def reserve(self, tokens: tuple[int, ...], salt: str) -> PrefixBlocks | None:
        """Blocks for a prefix: cached ones, and new ones for the rest, with a slot each where it is staged;
        None where there is no room beyond the reserve.
        """
        hashes = BlockHashChain(salt)
        hits = self._cached_blocks(tokens, hashes)
        num_new = len(tokens) // self._block_size - len(hits)
        self.expire_pins()
        if self._pool.num_free_after(hits, num_new) < self._free_block_reserve:
            return None
        slots = self._offload.take(num_new) if self.stages else []
        if self.stages and len(slots) < num_new:
            return None
        self._pool.share(hits)
        allocated = [self._pool.allocate() for _ in range(num_new)]
        new = [block_id for block_id in allocated if block_id is not None]
        reserved = PrefixBlocks(tokens, hashes, [*hits, *new], len(hits), slots)
        self._transferred.add(reserved)
        return reserved

    def publish_reserved(self, reserved: PrefixBlocks) -> None:
        """The reserved blocks have got their contents: enter them into the prefix cache."""
        size = self._block_size
        for index in range(reserved.num_cached, len(reserved.block_ids)):
            tokens = reserved.tokens[index * size : (index + 1) * size]
            self._publish_block(reserved.block_ids[index], reserved.hashes, index, tokens)
        reserved.num_cached = len(reserved.block_ids)

    def release_transferred(self, blocks: PrefixBlocks) -> None:
        """The transfer is over. What is published stays in the cache."""
        self._transferred.remove(blocks)
        self._pool.release(blocks.block_ids)
        self._offload.release(blocks.slots, after_step=False)
        blocks.slots = []

    # ---------------------------------------------------------------- staging

    @property
    def stages(self) -> bool:
        """Whether transfers read and write slots on the host instead of blocks."""
        return self._num_staging_slots > 0

    @property
    def num_staging_slots(self) -> int:
        """All of them, in use or not."""
        return self._num_staging_slots

    @property
    def has_staged_copies(self) -> bool:
        """Whether the next step copies to or from slots, so that it is wanted even if it computes nothing."""
        return self.stages and self._offload.has_copies

    def take_slots(self, count: int) -> list[int]:
        """Slots, owned by the caller until ``free_slots``; none where there are not so many."""
        slots = self._offload.take(count)
        self._staged.update(slots)
        return slots

    def free_slots(self, slots: Iterable[int]) -> None:
        """No copy and no transfer uses them any more."""
        freed = list(slots)
        self._staged.difference_update(freed)
        self._offload.release(freed, after_step=False)

    def stage(self, held: PrefixBlocks, slots: Tokens[int]) -> None:
        """Copy the blocks of a prefix to slots, in the next step."""
        self._offload.save(held.block_ids, slots)

    def unstage(self, reserved: PrefixBlocks) -> None:
        """Copy what was read from the slots of reserved blocks to the blocks, in the next step."""
        for slot, block_id in zip(reserved.slots, reserved.block_ids[reserved.num_cached :], strict=True):
            self._offload.load(slot, block_id)

    def _cached_blocks(self, tokens: Tokens[int], hashes: BlockHashChain) -> list[int]:
        """The leading blocks of a prefix that the device has; their numbers go to ``hashes``."""
        num_blocks, found = len(tokens) // self._block_size, list[int]()
        hashes.extend(tokens, num_blocks, self._block_size)
        for index in range(num_blocks if self._caching else 0):
            on_device = self._pool.find(hashes.digests[index])
            parent = hashes.numbers[-1] if index else ROOT
            if on_device is None or on_device[1] != hashes.content(parent, tokens, index, self._block_size):
                break
            found.append(on_device[0])
            hashes.numbers.append(on_device[2])
        return found

    def _publish_block(
        self, block_id: int, hashes: BlockHashChain, index: int, tokens: tuple[int, ...]
    ) -> None:
        """Enter one full block into the prefix cache; those before it have their numbers."""
        key = hashes.digest_of(index, tokens)
        content = Content(hashes.numbers[-1] if index else ROOT, tokens, hashes.salt)
        found = self._pool.find(key)
        if found is not None and found[1] == content:  # computed twice at the same time: the first one stays
            hashes.numbers.append(found[2])
            return
        number = self._offload.number_of(key, content) if self._has_offload else None
        if number is None:
            number = self._last_number = self._last_number + 1
        self._pool.publish(block_id, key, content, number)
        hashes.numbers.append(number)

    # ---------------------------------------------------------------- release

    def invalidate(self, sequence: Sequence) -> None:
        """What was computed for the sequence is wrong: remove it from the prefix cache and the lower
        tiers.
        """
        self._pool.unpublish(sequence.block_ids)
        self._offload.drop(sequence.block_hashes.digests)

    def preempt(self, sequence: Sequence) -> None:
        """Release the table. With swapping, the computed blocks are kept on the host if there is room;
        otherwise the sequence continues with whatever is still cached.
        """
        num_blocks = -(-sequence.num_computed // self._block_size)
        if self._swapping and num_blocks:
            sequence.swap_slots = self._offload.swap_out(sequence.block_ids[:num_blocks])
            if sequence.swap_slots:
                sequence.num_swapped_tokens = sequence.num_computed
                self._swaps += 1
        self._release(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Release the table after a load from a lower tier failed; no prefix hit counts."""
        sequence.num_cached_tokens = 0
        self._release(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Release everything. Published blocks stay in the cache, and are pinned if the client asked for
        it.
        """
        ttl = sequence.request.cache_ttl
        if ttl > 0 and sequence.block_ids:
            num_full = len(sequence.request.prompt_token_ids) // self._block_size
            digests = sequence.block_hashes.digests[:num_full]
            self._pins_refused += self._pool.pin(digests, self._clock() + ttl, sequence.request.client)
        self._release(sequence)
        self._release_swap_slots(sequence, after_step=False)

    def reset(self) -> None:
        """Clear the cache in every tier. Running sequences continue; what they publish from now on has a
        preceding content that is gone, so it is never found.
        """
        self._pool.reset()
        self._offload.reset()

    # ---------------------------------------------------------------- accounting

    def num_unaccounted(self, sequences: Iterable[Sequence]) -> int:
        """Leaked blocks. Cheaper than ``check``, and never raises."""
        return self._pool.num_unaccounted(self._tables(sequences))

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless free + cached + pinned + used blocks are all blocks, in every tier."""
        all_sequences = list(sequences)
        self._pool.check(self._tables(all_sequences))
        swapped = [slot for sequence in all_sequences for slot in sequence.swap_slots]
        transferred = [slot for blocks in self._transferred for slot in blocks.slots]
        self._offload.check([*swapped, *transferred, *self._staged])

    def _tables(self, sequences: Iterable[Sequence]) -> list[list[int]]:
        tables = [sequence.block_ids for sequence in sequences]
        return tables + [blocks.block_ids for blocks in self._transferred]

    def _find_prefix(self, sequence: Sequence) -> tuple[dict[int, int], dict[int, int], list[int]] | None:
        """Hits, loads, and the numbers of the leading hits; None while a part is being read from the disk."""
        tokens, hashes, size = sequence.tokens, sequence.block_hashes, self._block_size
        hits: dict[int, int] = {}
        loads: dict[int, int] = {}
        numbers: list[int] = []
        on_disk: list[bytes] = []
        parent, limit = ROOT, (len(tokens) - 1) // size
        hashes.extend(tokens, limit, size)
        for index in range(limit):
            key = hashes.digests[index]
            if (on_device := self._pool.find(key)) is not None:
                block_id, content, number = on_device
                if content != hashes.content(parent, tokens, index, size):
                    break
                hits[index] = block_id
                if index == len(numbers):
                    numbers.append(number)
            elif self._offload.is_arriving(key):
                return None
            else:
                entry = self._offload.on_host(key)
                is_on_host = entry is not None
                if entry is None and not sequence.has_waited_for_disk:
                    entry = self._offload.on_disk(key)
                if entry is None or entry.content != hashes.content(parent, tokens, index, size):
                    break
                number = entry.number
                if is_on_host:
                    loads[index] = entry.slot
                else:
                    on_disk.append(key)
            parent = number
        if on_disk:
            sequence.has_waited_for_disk = True
            return None if self._offload.fetch(on_disk) else self._find_prefix(sequence)
        return hits, loads, numbers

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_ids)
        sequence.block_ids, sequence.capacity = [], 0

    def _release_swap_slots(self, sequence: Sequence, *, after_step: bool) -> None:
        if sequence.swap_slots:
            self._offload.release(sequence.swap_slots, after_step=after_step)
            sequence.swap_slots, sequence.num_swapped_tokens = [], 0


def _drop(block_id: int, key: bytes, content: Content, number: int) -> None:
    """What is evicted is gone: there is no lower tier."""
