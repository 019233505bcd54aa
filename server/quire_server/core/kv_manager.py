"""The KV blocks of sequences: what is cached of one, whether the rest fits, and its table from start to
release.

Called by the scheduler, which decides who goes first and who has to give way; nothing in here knows an
order. The pool and its prefix cache are ``block_manager``'s business.
"""

from collections.abc import Iterable
from typing import NamedTuple

from quire_server.core.block_manager import BlockManager
from quire_server.core.limits import SchedulerConfig, SchedulerStats
from quire_server.core.sequence import Sequence


class Match(NamedTuple):
    """What is there already of a waiting sequence, and what has to be taken for the rest."""

    hits: list[int]
    num_new: int
    num_cached: int  # tokens that need not be computed


class KVManager:
    """Every method is O(blocks of the sequence it is given)."""

    def __init__(self, config: SchedulerConfig, stats: SchedulerStats) -> None:
        self._size = config.block_size
        self._blocks = BlockManager(
            config.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self._watermark = int(config.num_blocks * config.watermark)
        self._stats = stats

    @property
    def utilization(self) -> float:
        """Share of blocks in use; cached ones count as free."""
        return 1 - self._blocks.num_free / self._blocks.num_blocks

    @property
    def evictions(self) -> int:
        """Cached blocks that were given away since the start."""
        return self._blocks.evictions

    def match(self, sequence: Sequence) -> Match:
        """The longest prefix that is cached, short of the last token. Takes nothing."""
        hits = self._blocks.lookup(sequence.tokens, sequence.chain)
        num_new = -(-len(sequence.tokens) // self._size) - len(hits)
        return Match(hits, num_new, len(hits) * self._size)

    def fits(self, match: Match, *, alone: bool, reclaimed: int = 0) -> bool:
        """Whether there are blocks for it, once so many are given back; beside others the watermark stays
        free, against thrashing.
        """
        free = self._blocks.num_free_after(match.hits, match.num_new) + reclaimed
        return free >= (0 if alone else self._watermark)

    def start(self, sequence: Sequence, match: Match) -> None:
        """Give a sequence its table. ``match`` is of this very moment, and fits."""
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = match.num_cached
            self._stats.prefix_query_tokens += len(sequence.tokens)
            self._stats.prefix_hit_tokens += match.num_cached
        sequence.block_ids = self._blocks.take(match.hits, match.num_new, sequence.chain)
        sequence.capacity = len(sequence.block_ids) * self._size
        sequence.num_computed, sequence.num_published = match.num_cached, len(match.hits)

    def grow(self, sequence: Sequence) -> int | None:
        """A block more at the end of the table, or None when none is free."""
        block_id = self._blocks.grow()
        if block_id is not None:
            sequence.block_ids.append(block_id)
            sequence.capacity += self._size
        return block_id

    def publish(self, sequence: Sequence) -> None:
        """Offer the full blocks that were computed since the last time to later requests."""
        num_full = sequence.num_computed // self._size
        for index in range(sequence.num_published, num_full):
            self._blocks.publish(sequence.tokens, sequence.chain, index, sequence.block_ids[index])
        sequence.num_published = num_full

    def distrust(self, sequence: Sequence) -> None:
        """What was computed for it is wrong: no later request may find it."""
        self._blocks.unpublish(sequence.block_ids)

    def release(self, sequence: Sequence) -> None:
        """Take its table back; what was published stays findable until its blocks are needed."""
        self._blocks.release(sequence.block_ids)
        sequence.block_ids, sequence.capacity = [], 0

    def num_unaccounted(self, running: Iterable[Sequence]) -> int:
        """Blocks that are neither free nor in a table; cheaper than ``check``, and never raises."""
        held = {block_id for sequence in running for block_id in sequence.block_ids}
        return self._blocks.num_blocks - self._blocks.num_free - len(held)

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError when free + cached + used blocks are not all blocks."""
        self._blocks.check(sequence.block_ids for sequence in running)
