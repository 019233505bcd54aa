"""What each lower tier keeps when it is full, and what the counters of the prefix cache say exactly."""

from quire_server.core.step import CopyOutcome
from tests.server.core.test_kv_manager import Cache


def prompt(number: int) -> list[int]:
    """One full block, and a token more."""
    return [number] * 5


def down(cache: Cache, number: int) -> None:
    """Compute a prompt, and push its block off the device."""
    cache.finish(cache.computed(prompt(number)))
    cache.use_all()


def test_the_host_gives_away_what_was_used_least_recently() -> None:
    cache = Cache(num_host_slots=2)
    down(cache, 1)
    down(cache, 2)
    assert cache.cached(prompt(1)) == 4, "which is a use"
    down(cache, 3)
    assert [cache.cached(prompt(number)) for number in (1, 2, 3)] == [4, 0, 4]


def test_the_disk_gives_away_what_was_used_least_recently() -> None:
    cache = Cache(num_host_slots=1, num_disk_slots=3)
    for number in (1, 2, 3):
        down(cache, number)
    used = cache.sequence(prompt(1))
    assert cache.kv.match(used) is None, "it is read from the disk"
    copies = cache.kv.copies()
    assert copies is not None
    cache.settle(CopyOutcome(arrived=tuple(slot for _, slot in copies.fetches)))
    for number in (4, 5):
        down(cache, number)
    assert cache.kv.stats().disk_evicted == 1
    assert cache.cached(prompt(2)) == 0
    assert cache.kv.match(cache.sequence(prompt(1))) is None, "it is there to be read again"


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


def test_what_is_found_in_any_tier_is_a_hit() -> None:
    cache = Cache(num_host_slots=4)
    down(cache, 1)
    cache.computed([*prompt(1), 9, 9, 9, 9])
    assert (cache.kv.stats().prefix_queries, cache.kv.stats().prefix_hits) == (14, 4)


def test_a_block_that_came_up_wrong_is_in_no_tier_any_more() -> None:
    cache = Cache(num_host_slots=1, num_disk_slots=3)
    for number in (1, 2):
        down(cache, number)
    wanted = cache.sequence(prompt(1))
    assert cache.kv.match(wanted) is None, "it is read from the disk, which keeps it"
    copies = cache.kv.copies()
    assert copies is not None
    cache.settle(CopyOutcome(arrived=tuple(slot for _, slot in copies.fetches)))
    match = cache.kv.match(wanted)
    assert match is not None and match.loads
    cache.kv.start(wanted, match)
    copies = cache.kv.copies()
    assert copies is not None
    cache.settle(CopyOutcome(failed=tuple(block_id for _, block_id in copies.loads)))
    match = cache.kv.match(cache.sequence(prompt(1)))
    assert match is not None and not match.loads, "neither on the host nor to be read again"
