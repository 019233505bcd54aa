"""The prefix cache, pinned prompts and KV offload, on sequences without a scheduler."""

import tracemalloc

import pytest

from quire_server.core import block_hash
from quire_server.core.block_hash import BlockHashChain
from quire_server.core.config import PreemptionMode
from quire_server.core.kv_cache_manager import KVCacheManager
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.sequence import Sequence
from quire_server.core.step import Copies, CopyOutcome, StepResult
from tests.server.core.fake_runner import config


class Cache:
    """A KV cache manager and the sequences that have a block table."""

    def __init__(self, num_blocks: int = 8, **settings: object) -> None:
        self.now = 0.0
        self.kv = KVCacheManager(config(num_blocks=num_blocks, **settings), lambda: self.now)
        self.running: list[Sequence] = []

    def sequence(self, tokens: list[int], salt: str = "", ttl: float = 0.0, client: str = "") -> Sequence:
        kept = {"cache_salt": salt, "cache_ttl": ttl, "client": client}
        request = Request("r", tuple(tokens), SamplingParams(9), 0.0, **kept)  # type: ignore[arg-type]
        return Sequence(request, (0, 0), 0, frozenset(), 99, 0, 99, list(tokens), BlockHashChain(salt))

    def cached(self, tokens: list[int], salt: str = "") -> int:
        """The number of cached tokens of a request with this prompt."""
        match = self.kv.match(self.sequence(tokens, salt))
        assert match is not None
        return match.num_cached

    def computed(self, tokens: list[int], salt: str = "", ttl: float = 0.0, client: str = "") -> Sequence:
        """A sequence whose tokens were computed in a step of their own."""
        sequence = self.sequence(tokens, salt, ttl, client)
        match = self.kv.match(sequence)
        assert match is not None and self.kv.fits(match, is_alone=not self.running)
        self.kv.start(sequence, match)
        self.copies = self.kv.take_copies()
        sequence.num_computed = len(tokens)
        self.kv.publish(sequence)
        self.running.append(sequence)
        self.kv.check(self.running)
        return sequence

    def finish(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.running.remove(sequence)
            self.kv.finish(sequence)
        self.kv.check(self.running)

    def apply_outcome(self, outcome: CopyOutcome) -> frozenset[int]:
        return self.kv.apply_copy_outcome(StepResult(1, (), copied=outcome))

    def evict_all(self) -> Copies | None:
        """Allocate and release every free block, which evicts all cached blocks of the device."""
        greedy = self.sequence([1])
        while self.kv.append_block(greedy) is not None:
            pass
        copies = self.kv.take_copies()
        self.kv.finish(greedy)
        return copies


def test_a_second_request_shares_the_full_blocks_of_its_prefix() -> None:
    cache, prompt = Cache(), list(range(10))
    first, second = cache.computed(prompt), cache.computed([*prompt[:8], 77, 78])
    assert first.block_ids[:2] == second.block_ids[:2] and first.block_ids[2] != second.block_ids[2]
    assert cache.kv.utilization == 4 / 8


def test_the_last_prompt_token_is_never_taken_from_the_cache() -> None:
    cache, prompt = Cache(), list(range(8))
    cache.computed(prompt)
    assert cache.cached(prompt) == 4


def test_another_salt_shares_nothing() -> None:
    cache, prompt = Cache(), list(range(9))
    cache.computed(prompt, salt="alice")
    assert cache.cached(prompt, "bob") == 0 and cache.cached(prompt, "alice") == 8


def test_released_blocks_stay_cached_until_needed_and_the_last_blocks_are_evicted_first() -> None:
    cache, prompt = Cache(4), list(range(9))
    cache.finish(cache.computed(prompt))
    assert cache.kv.utilization == 0 and cache.cached(prompt) == 8
    other = cache.computed([50, 51, 52, 53, 54, 55, 56, 57])  # two blank blocks are there for these
    assert cache.kv.stats().evictions == 0 and cache.cached(prompt) == 8
    assert cache.kv.append_block(other) is not None
    assert cache.kv.stats().evictions == 1 and cache.cached(prompt) == 4


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    cache = Cache(4)
    old, new = [1, 2, 3, 4, 9], [5, 6, 7, 8, 9]
    for tokens in (old, new, old):
        cache.finish(cache.computed(tokens))
    greedy = cache.sequence([1])
    for _ in range(3):
        cache.kv.append_block(greedy)
    assert cache.cached(old) == 4 and cache.cached(new) == 0


def test_a_hash_collision_never_hands_out_another_prompts_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hash, "digest", lambda previous, block: b"always the same")
    cache = Cache(16, num_host_slots=4)
    cache.computed([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.cached([5, 6, 7, 8, 1, 2]) == 0  # same tokens, other prefix
    assert cache.cached([9, 9, 9, 9, 9]) == 0
    nines = cache.computed([9, 9, 9, 9, 9])
    assert cache.cached([9, 9, 9, 9, 9]) == 4 and cache.cached([9, 9, 9, 9, 9], "other") == 0
    cache.finish(nines)
    cache.evict_all()  # to the host
    assert cache.cached([9, 9, 9, 9, 9]) == 4
    assert cache.cached([9, 9, 9, 9, 9], "other") == 0 and cache.cached([8, 9, 9, 9, 9]) == 0


def test_check_detects_inconsistent_block_counts() -> None:
    cache = Cache()
    sequence = cache.computed([1, 2, 3])
    with pytest.raises(AssertionError):
        cache.kv.check([])
    table = list(sequence.block_ids)
    cache.finish(sequence)
    sequence.block_ids = table
    with pytest.raises(AssertionError):
        cache.kv.finish(sequence)


def test_without_prefix_caching_nothing_is_cached_or_offloaded() -> None:
    cache = Cache(enable_prefix_caching=False, num_host_slots=4)
    cache.finish(cache.computed(list(range(9))))
    assert cache.evict_all() is None and cache.cached(list(range(9))) == 0


def test_a_reset_drops_all_cached_blocks_even_of_running_requests() -> None:
    cache, old, new = Cache(num_host_slots=8), list(range(9)), list(range(20, 29))
    cache.finish(cache.computed(old))
    cache.evict_all()
    running = cache.computed(new)
    cache.kv.reset()
    assert cache.cached(old) == cache.cached(new) == 0
    running.tokens += [1, 2, 3]
    running.num_computed = 12
    cache.kv.publish(running)
    assert cache.cached([*new, 1, 2, 3, 4]) == 0
    cache.finish(running)
    cache.computed(new)
    assert cache.cached(new) == 8


def test_pinned_prompts_survive_eviction_until_their_time_ends() -> None:
    cache, kept, lost = Cache(max_pinned_share=0.25), list(range(9)), list(range(20, 29))
    cache.finish(cache.computed(kept, ttl=300.0), cache.computed(lost))
    cache.evict_all()
    assert cache.cached(kept) == 8 and cache.cached(lost) == 0
    cache.now = 299.0
    cache.evict_all()
    assert cache.cached(kept) == 8 and cache.kv.stats().pinned == 2
    cache.now = 300.0
    cache.evict_all()
    assert cache.cached(kept) == 0 and cache.kv.stats().pinned == 0


def test_using_a_pinned_prompt_again_starts_its_time_anew() -> None:
    cache, prompt = Cache(max_pinned_share=0.25), list(range(9))
    for cache.now in (0.0, 200.0):
        cache.finish(cache.computed(prompt, ttl=300.0))
    cache.now = 499.0
    cache.evict_all()
    assert cache.cached(prompt) == 8


def test_at_most_a_share_of_the_pool_is_pinned() -> None:
    cache = Cache(max_pinned_share=0.25)
    cache.finish(cache.computed(list(range(17)), ttl=300.0))
    stats = cache.kv.stats()
    assert (stats.pinned, stats.pins_refused) == (2, 2)
    assert cache.kv.utilization == 2 / 8


def test_no_client_pins_what_it_does_not_leave_to_others() -> None:
    cache, starts = Cache(num_blocks=64, max_pinned_share=0.25), iter(range(0, 10_000, 100))

    def pin(client: str, num_blocks: int) -> int:
        before, start = cache.kv.stats().pinned, next(starts)
        cache.finish(cache.computed(list(range(start, start + 4 * num_blocks + 1)), ttl=300.0, client=client))
        return cache.kv.stats().pinned - before

    assert [pin("alice", 5) for _ in range(4)] == [5, 3, 0, 0], "half of 16"
    assert (pin("bob", 9), pin("carol", 9), pin("alice", 1)) == (4, 2, 0)
    cache.now = 300.0
    assert pin("bob", 9) == 8 - 14, "those of all have ended"


def test_renewed_pins_take_no_more_memory() -> None:
    cache, prompt = Cache(num_blocks=1024, max_pinned_share=0.25), list(range(4 * 256 + 1))
    cache.finish(cache.computed(prompt, ttl=300.0))
    tracemalloc.start()
    try:
        for cache.now in map(float, range(200)):
            cache.finish(cache.computed(prompt, ttl=300.0))
        assert cache.kv.stats().pinned == 256
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_pin_ends_in_its_own_time_whatever_was_pinned_before() -> None:
    cache, prompt = Cache(max_pinned_share=0.25), list(range(9))
    cache.finish(cache.computed(prompt, ttl=3600.0))
    cache.kv.reset()
    assert cache.kv.utilization == 0
    cache.finish(cache.computed(prompt, ttl=300.0))
    cache.now = 200.0
    cache.finish(cache.computed(prompt, ttl=300.0))
    cache.now = 499.0
    cache.kv.expire_pins()
    assert cache.kv.stats().pinned == 2
    cache.now = 500.0
    cache.kv.expire_pins()
    assert cache.kv.stats().pinned == 0


def test_pins_are_released_for_a_request_that_would_not_fit_otherwise() -> None:
    cache = Cache(max_pinned_share=0.5)
    cache.finish(cache.computed(list(range(17)), ttl=300.0))
    assert len(cache.computed(list(range(100, 132))).block_ids) == 8


def test_a_block_that_the_device_evicts_is_found_on_the_host_and_copied_back() -> None:
    cache, prompt = Cache(num_host_slots=4), list(range(9))
    table = cache.computed(prompt).block_ids[:2]
    cache.finish(*cache.running)
    copies = cache.evict_all()
    assert copies is not None and {block for block, _ in copies.saves} == set(table)
    assert cache.cached(prompt) == 8
    again = cache.computed(prompt)
    assert cache.copies is not None
    assert [block for _, block in cache.copies.loads] == again.block_ids[:2]
    assert dict(cache.copies.loads).keys() == {slot for _, slot in copies.saves}
    cache.finish(again)
    second = cache.evict_all()
    assert second is None, "what the host still holds is not copied again"


def test_a_block_that_failed_its_checksum_is_forgotten() -> None:
    cache, prompt = Cache(num_host_slots=4), list(range(9))
    cache.finish(cache.computed(prompt))
    cache.evict_all()
    sequence = cache.sequence(prompt)
    match = cache.kv.match(sequence)
    assert match is not None and match.num_cached == 8
    cache.kv.start(sequence, match)
    copies = cache.kv.take_copies()
    assert copies is not None
    assert cache.apply_outcome(CopyOutcome(failed=(sequence.block_ids[0],))) == {sequence.block_ids[0]}
    cache.kv.discard(sequence)
    assert cache.cached(prompt) == 0 and cache.kv.stats().corrupt == 1
    cache.kv.check([])


def test_a_block_that_the_host_evicts_is_read_from_the_disk_before_the_request_starts() -> None:
    cache, old, new = Cache(num_host_slots=2, num_disk_slots=4), list(range(9)), list(range(20, 29))
    cache.finish(cache.computed(old))
    cache.evict_all()
    cache.finish(cache.computed(new))
    copies = cache.evict_all()
    assert copies is not None and len(copies.spills) == 2
    sequence = cache.sequence(old)
    assert cache.kv.match(sequence) is None
    copies = cache.kv.take_copies()
    assert copies is not None and len(copies.fetches) == 2
    assert cache.kv.match(sequence) is None
    cache.apply_outcome(CopyOutcome(arrived=tuple(slot for _, slot in copies.fetches)))
    match = cache.kv.match(sequence)
    assert match is not None and match.num_cached == 8
    cache.kv.check([])


@pytest.mark.parametrize("outcome", ["missed", "reset", "broken"])
def test_a_failed_read_from_the_disk_is_a_cache_miss(outcome: str) -> None:
    cache, old = Cache(num_host_slots=2, num_disk_slots=4), list(range(9))
    for prompt in (old, list(range(20, 29))):
        cache.finish(cache.computed(prompt))
        cache.evict_all()
    sequence = cache.sequence(old)
    assert cache.kv.match(sequence) is None
    copies = cache.kv.take_copies()
    assert copies is not None
    slots = tuple(slot for _, slot in copies.fetches)
    if outcome == "reset":
        cache.kv.reset()
        cache.apply_outcome(CopyOutcome(arrived=slots))
    else:
        cache.apply_outcome(CopyOutcome(missed=slots, disk_failed=outcome == "broken"))
    match = cache.kv.match(sequence)
    assert match is not None and match.num_cached == 0
    assert cache.cached(old) == 0
    cache.kv.check([])


def test_a_swapped_request_continues_where_it_was_even_without_a_prefix_cache() -> None:
    cache = Cache(num_host_slots=8, preemption_mode=PreemptionMode.SWAP, enable_prefix_caching=False)
    sequence = cache.computed(list(range(10)))
    table = list(sequence.block_ids)
    cache.kv.preempt(sequence)
    saved = cache.kv.take_copies()
    assert saved is not None and [block for block, _ in saved.saves] == table
    cache.kv.check([sequence])
    sequence.tokens.append(99)
    match = cache.kv.match(sequence)
    assert match is not None and match.num_cached == 10
    cache.kv.start(sequence, match)
    loaded = cache.kv.take_copies()
    assert loaded is not None and [slot for slot, _ in loaded.loads] == [slot for _, slot in saved.saves]
    cache.kv.check([sequence])
    assert cache.kv.stats().swaps == 1 and cache.kv.stats().host_used == 0


def test_with_a_full_host_tier_a_preempted_request_is_recomputed() -> None:
    cache = Cache(num_host_slots=1, preemption_mode=PreemptionMode.SWAP)
    sequence = cache.computed(list(range(10)))
    cache.kv.preempt(sequence)
    assert cache.kv.take_copies() is None and sequence.num_swapped_tokens == 0 and cache.kv.stats().swaps == 0


def test_aborting_a_swapped_request_frees_its_slots() -> None:
    cache = Cache(num_host_slots=8, preemption_mode=PreemptionMode.SWAP)
    sequence = cache.computed(list(range(10)))
    cache.kv.preempt(sequence)
    cache.kv.take_copies()
    assert cache.kv.stats().host_used == 3
    cache.kv.finish(sequence)
    assert cache.kv.stats().host_used == 0
    cache.kv.check([])
