"""The KV blocks of sequences: what is cached of one, whether the rest fits, and its table from start to
release.

Called by the scheduler, which decides who goes first and who has to give way; nothing in here knows an
order. The device's pool is ``block_manager``'s business, what lies below it that of ``tiers``; here they
meet: a block from a lower tier is treated as one that the step computes, so it is published after it.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from quire_server.core.block_manager import BlockManager
from quire_server.core.kv_stats import KVStats
from quire_server.core.limits import PreemptionMode, SchedulerConfig
from quire_server.core.prefix_chain import ROOT, Content
from quire_server.core.sequence import Sequence
from quire_server.core.step import Copies, StepResult
from quire_server.core.tiers import Tiers


class Match(NamedTuple):
    """What is there already of a waiting sequence, and how many blocks the rest takes."""

    hits: dict[int, int]  # place in the table -> block of the device, to be shared
    loads: dict[int, int]  # place in the table -> host slot, to be copied to a new block
    numbers: list[int]  # of the contents in the hits that lead the table
    num_new: int
    num_cached: int  # tokens that need not be computed


class KVManager:
    """Every method is O(blocks of the sequence it is given), but for ``reset`` and ``check``."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self._size = config.block_size
        self._caching = config.enable_prefix_caching
        self._swapping = config.preemption_mode is PreemptionMode.SWAP
        self._watermark = int(config.num_blocks * config.watermark)
        self._clock = clock
        self._tiers = Tiers(config.num_host_slots, config.num_disk_slots)
        self._has_tiers = config.num_host_slots > 0
        self._blocks = BlockManager(
            config.num_blocks,
            max_pinned=int(config.num_blocks * config.pinnable),
            on_evict=self._tiers.demote,
        )
        self._last_number = ROOT
        self._queries = self._hits = self._pins_refused = self._swaps = 0

    @property
    def utilization(self) -> float:
        """Share of blocks in use or pinned; cached ones count as free."""
        return 1 - self._blocks.num_free / self._blocks.num_blocks

    def stats(self) -> KVStats:
        """Gauges and counters of this moment."""
        host, disk = self._tiers.stats()
        return KVStats(
            self._queries,
            self._hits,
            self._blocks.evictions,
            self._blocks.num_pinned,
            self._pins_refused,
            self._swaps,
            self._tiers.corrupt,
            *host,
            *disk,
            self._tiers.disk_failed,
        )

    def match(self, sequence: Sequence) -> Match | None:
        """The longest prefix that is cached, short of the last token. None: a part of it is on its way from
        the disk, ask again after the next step. Takes nothing. Who is to be told of the prompt's positions
        computes them.
        """
        is_told = sequence.num_reported >= sequence.num_to_report
        found = self._walk(sequence) if self._caching and is_told else ({}, {}, [])
        if found is None:
            return None
        hits, loads, numbers = found
        num_cached = (len(hits) + len(loads)) * self._size
        if sequence.num_swapped > num_cached:
            num_cached = sequence.num_swapped
            loads = {place: slot for place, slot in enumerate(sequence.swapped) if place not in hits}
        num_new = -(-len(sequence.tokens) // self._size) - len(hits)
        return Match(hits, loads, numbers, num_new, num_cached)

    def fits(self, match: Match, *, alone: bool, reclaimed: int = 0) -> bool:
        """Whether there are blocks for it, once so many are given back; beside others the watermark stays
        free, against thrashing, and to one that is alone even pins give way.
        """
        if self._blocks.num_pinned:
            self._blocks.expire(self._clock())
        spare = self._blocks.num_free_after(match.hits.values(), match.num_new) + reclaimed
        if alone:
            return spare >= 0 or (
                self.yield_pins() and self._blocks.num_free_after(match.hits.values(), match.num_new) >= 0
            )
        return spare >= self._watermark

    def reclaimable(self, sequence: Sequence, given_back: Counter[int], match: Match) -> int:
        """Blocks that its table would give to ``match``, after the tables in ``given_back``, which gains it.
        What the match shares anyway is none of them.
        """
        hits = set(match.hits.values())
        return sum(block_id not in hits for block_id in self._blocks.freed_by(sequence.block_ids, given_back))

    def start(self, sequence: Sequence, match: Match) -> None:
        """Give a sequence its table. ``match`` is of this very moment, and fits."""
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = match.num_cached
            self._queries += len(sequence.tokens)
            self._hits += match.num_cached
        self._blocks.share(match.hits.values())  # before any allocation, which might evict them
        for slot in match.loads.values():  # before any eviction, which might want these slots
            self._tiers.lock(slot)
        for place in range(len(match.hits) + match.num_new):
            block_id = match.hits[place] if place in match.hits else self._blocks.allocate()
            assert block_id is not None, "the match does not fit"
            if place in match.loads:
                self._tiers.load(match.loads[place], block_id)
            sequence.block_ids.append(block_id)
        sequence.capacity = len(sequence.block_ids) * self._size
        sequence.num_computed, sequence.num_published = match.num_cached, len(match.numbers)
        sequence.chain.numbers[:] = match.numbers
        sequence.has_fetched = False
        self._forget_swapped(sequence, after_step=True)

    @property
    def num_free(self) -> int:
        """Blocks that ``grow`` could hand out now."""
        return self._blocks.num_free

    @property
    def has_spare(self) -> bool:
        """Whether a block may go to somebody who could do without."""
        return self._blocks.num_free > self._watermark

    def grow(self, sequence: Sequence) -> int | None:
        """A block more at the end of the table, or None when none is free."""
        if self._blocks.num_pinned:
            self._blocks.expire(self._clock())
        block_id = self._blocks.allocate()
        if block_id is not None:
            sequence.block_ids.append(block_id)
            sequence.capacity += self._size
        return block_id

    def yield_pins(self) -> bool:
        """Give up what explicit prompt caching keeps, rather than fail a request; False: there is nothing."""
        return self._blocks.yield_pins()

    def copies(self) -> Copies | None:
        """What the step that was just decided has to copy. Called once for each step."""
        return self._tiers.copies()

    def settle(self, result: StepResult) -> frozenset[int]:
        """Take in what became of copies. Returns blocks whose content did not come: whoever computed with
        them has to start again.
        """
        if result.copied is None:
            return frozenset()
        self._tiers.settle(result.copied)
        return frozenset(result.copied.failed)

    def publish(self, sequence: Sequence) -> None:
        """Offer the full blocks that were computed since the last time to later requests."""
        num_full, chain, size = sequence.num_computed // self._size, sequence.chain, self._size
        if not self._caching:
            sequence.num_published = num_full
            return
        for place in range(sequence.num_published, num_full):
            tokens = tuple(sequence.tokens[place * size : (place + 1) * size])
            key = chain.link(place, tokens)
            content = Content(chain.numbers[-1] if place else ROOT, tokens, chain.salt)
            found = self._blocks.find(key)
            if found is not None and found[1] == content:  # computed twice at once: keep the first
                chain.numbers.append(found[2])
                continue
            number = self._tiers.number_of(key, content) if self._has_tiers else None
            if number is None:
                number = self._last_number = self._last_number + 1
            self._blocks.publish(sequence.block_ids[place], key, content, number)
            chain.numbers.append(number)
        sequence.num_published = num_full

    def distrust(self, sequence: Sequence) -> None:
        """What was computed for it is wrong: no later request may find it."""
        self._blocks.unpublish(sequence.block_ids)
        self._tiers.drop(sequence.chain.digests)

    def preempt(self, sequence: Sequence) -> None:
        """Take its table back for others. What it computed stays on the host where that was asked for and
        there is room; otherwise it goes on with what it then still finds in the caches.
        """
        num_blocks = -(-sequence.num_computed // self._size)
        if self._swapping and num_blocks:
            sequence.swapped = self._tiers.swap_out(sequence.block_ids[:num_blocks])
            if sequence.swapped:
                sequence.num_swapped = sequence.num_computed
                self._swaps += 1
        self._release(sequence)

    def spoilt(self, sequence: Sequence) -> None:
        """Take its table back since its content did not come from a lower tier: nothing of it counts."""
        sequence.num_cached_tokens = 0
        self._release(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take everything back. What was published stays findable, and pinned if the client asked for it."""
        ttl = sequence.request.cache_ttl
        if ttl > 0 and sequence.block_ids:
            num_full = len(sequence.request.prompt_token_ids) // self._size
            self._pins_refused += self._blocks.pin(sequence.chain.digests[:num_full], self._clock() + ttl)
        self._release(sequence)
        self._forget_swapped(sequence, after_step=False)

    def reset(self) -> None:
        """Forget all that is cached, in every tier. What runs goes on; what it publishes from now on builds
        on contents that are gone, so that nobody finds it.
        """
        self._blocks.reset()
        self._tiers.reset()

    def num_unaccounted(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that are nobody's; cheaper than ``check``, and never raises."""
        return self._blocks.num_unaccounted(sequence.block_ids for sequence in sequences)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError when free + cached + pinned + used blocks are not all blocks, in any tier."""
        everyone = list(sequences)
        self._blocks.check(sequence.block_ids for sequence in everyone)
        self._tiers.check(slot for sequence in everyone for slot in sequence.swapped)

    def _walk(self, sequence: Sequence) -> tuple[dict[int, int], dict[int, int], list[int]] | None:
        """Hits, loads, and numbers of leading hits; None while something is on its way."""
        tokens, chain, size = sequence.tokens, sequence.chain, self._size
        hits: dict[int, int] = {}
        loads: dict[int, int] = {}
        numbers: list[int] = []
        far: list[bytes] = []
        parent, limit = ROOT, (len(tokens) - 1) // size
        chain.extend(tokens, limit, size)
        for place in range(limit):
            key = chain.digests[place]
            if (on_device := self._blocks.find(key)) is not None:
                block_id, content, number = on_device
                if content != chain.content(parent, tokens, place, size):
                    break
                hits[place] = block_id
                if place == len(numbers):
                    numbers.append(number)
            elif self._tiers.is_arriving(key):
                return None
            else:
                filed = self._tiers.on_host(key)
                is_far = filed is None
                if filed is None:
                    filed = None if sequence.has_fetched else self._tiers.on_disk(key)
                if filed is None or filed.content != chain.content(parent, tokens, place, size):
                    break
                number = filed.number
                if is_far:
                    far.append(key)
                else:
                    loads[place] = filed.slot
            parent = number
        if far:
            sequence.has_fetched = True
            return None if self._tiers.fetch(far) else self._walk(sequence)
        return hits, loads, numbers

    def _release(self, sequence: Sequence) -> None:
        self._blocks.release(sequence.block_ids)
        sequence.block_ids, sequence.capacity = [], 0

    def _forget_swapped(self, sequence: Sequence, *, after_step: bool) -> None:
        if sequence.swapped:
            self._tiers.give_back(sequence.swapped, after_step=after_step)
            sequence.swapped, sequence.num_swapped = [], 0
