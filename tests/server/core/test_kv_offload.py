"""Eviction in full host and disk tiers, and the exact values of the prefix cache's counters."""

from quire_server.core.step import CopyOutcome
from tests.server.core.test_kv_cache_manager import Cache


def one_block_prompt(number: int) -> list[int]:
    """A prompt of one full block and one more token."""
    return [number] * 5


def offload(cache: Cache, number: int) -> None:
    """Compute a prompt and evict its block from the device."""
    cache.finish(cache.computed(one_block_prompt(number)))
    cache.evict_all()


def test_the_host_evicts_the_least_recently_used_block() -> None:
    cache = Cache(num_host_slots=2)
    offload(cache, 1)
    offload(cache, 2)
    assert cache.cached(one_block_prompt(1)) == 4, "which is a use"
    offload(cache, 3)
    assert [cache.cached(one_block_prompt(number)) for number in (1, 2, 3)] == [4, 0, 4]


def test_the_disk_evicts_the_least_recently_used_block() -> None:
    cache = Cache(num_host_slots=1, num_disk_slots=3)
    for number in (1, 2, 3):
        offload(cache, number)
    used = cache.sequence(one_block_prompt(1))
    assert cache.kv.match(used) is None, "it is read from the disk"
    copies = cache.kv.take_copies()
    assert copies is not None
    cache.apply_outcome(CopyOutcome(arrived=tuple(slot for _, slot in copies.fetches)))
    for number in (4, 5):
        offload(cache, number)
    assert cache.kv.stats().disk_evicted == 1
    assert cache.cached(one_block_prompt(2)) == 0
    assert cache.kv.match(cache.sequence(one_block_prompt(1))) is None, "it is there to be read again"


def test_queries_and_hits_are_counted_in_tokens_and_once_for_each_request() -> None:
    cache, tokens = Cache(), list(range(10))
    first = cache.computed(tokens)
    cache.computed([*tokens, 11, 12, 13])
    assert (cache.kv.stats().prefix_queries, cache.kv.stats().prefix_hits) == (23, 8)
    cache.running.remove(first)
    cache.kv.preempt(first)
    first.tokens.append(10)
    match = cache.kv.match(first)
    assert match is not None and match.num_cached == 8
    cache.kv.start(first, match)
    assert (cache.kv.stats().prefix_queries, cache.kv.stats().prefix_hits) == (23, 8), "it was counted before"


def test_a_block_found_in_any_tier_is_a_hit() -> None:
    cache = Cache(num_host_slots=4)
    offload(cache, 1)
    cache.computed([*one_block_prompt(1), 9, 9, 9, 9])
    assert (cache.kv.stats().prefix_queries, cache.kv.stats().prefix_hits) == (14, 4)


def test_a_corrupt_block_is_removed_from_every_tier() -> None:
    cache = Cache(num_host_slots=1, num_disk_slots=3)
    for number in (1, 2):
        offload(cache, number)
    wanted = cache.sequence(one_block_prompt(1))
    assert cache.kv.match(wanted) is None, "it is read from the disk, which keeps it"
    copies = cache.kv.take_copies()
    assert copies is not None
    cache.apply_outcome(CopyOutcome(arrived=tuple(slot for _, slot in copies.fetches)))
    match = cache.kv.match(wanted)
    assert match is not None and match.loads
    cache.kv.start(wanted, match)
    copies = cache.kv.take_copies()
    assert copies is not None
    cache.apply_outcome(CopyOutcome(failed=tuple(block_id for _, block_id in copies.loads)))
    match = cache.kv.match(cache.sequence(one_block_prompt(1)))
    assert match is not None and not match.loads, "neither on the host nor to be read again"
