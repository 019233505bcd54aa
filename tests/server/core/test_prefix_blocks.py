"""Blocks kept for transfers: accounted for, not overwritten, and no reason for a request to fail."""

import pytest

from quire_server.core.block_hash import BlockHashChain
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import StepResult

SIZE = 4
LIMITS = SchedulerConfig(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=64,
    num_blocks=8,
    block_size=SIZE,
    free_block_reserve=0.0,
)


class Engine:
    """A scheduler whose model always answers 7."""

    def __init__(self):
        self.scheduler = Scheduler(LIMITS, eos_token_ids=())
        self.kv = self.scheduler.kv
        self.events = []

    def add(self, name, tokens, max_tokens=1, salt="s"):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.scheduler.add(Request(name, tuple(tokens), sampling, arrival=0.0, cache_salt=salt))
        return self

    def step(self):
        step = self.scheduler.schedule()
        if step is not None:
            tokens = (7,) * sum(step.samples)
            self.events += self.scheduler.commit(step, StepResult(step.step_id, tokens)).events
        self.scheduler.check()
        return step

    def run(self, steps=30):
        for _ in range(steps):
            if not self.scheduler.has_work:
                return self
            self.step()
        return self

    def errors(self):
        return [event.error for event in self.events if event.error]


@pytest.fixture
def engine():
    return Engine()


PREFIX = tuple(range(1, 13))  # three blocks


def test_held_blocks_are_those_of_the_prefix_and_survive_other_requests(engine):
    engine.add("a", PREFIX).run()
    held = engine.kv.hold(PREFIX, "s")
    assert len(held.block_ids) == 3
    assert engine.scheduler.num_unaccounted_blocks == 0
    for number in range(4):
        engine.add(f"b{number}", [50 + number] * 15).run()
    again = engine.kv.hold(PREFIX, "s")
    assert again.block_ids == held.block_ids
    engine.scheduler.release_prefix(held)
    engine.scheduler.release_prefix(again)
    engine.scheduler.check()
    assert engine.kv.num_free == LIMITS.num_blocks


@pytest.mark.parametrize(
    ("tokens", "salt"), [(PREFIX, "another"), (tuple(range(2, 14)), "s"), (PREFIX * 2, "s")]
)
def test_nothing_is_held_for_another_salt_other_tokens_or_a_longer_prefix(engine, tokens, salt):
    engine.add("a", PREFIX).run()
    assert engine.kv.hold(tokens, salt) is None
    assert not engine.kv.has_transfers


def test_a_reserved_prefix_is_found_only_once_it_is_published(engine):
    reserved = engine.scheduler.reserve_prefix(PREFIX, "s")
    assert (reserved.num_cached, len(reserved.block_ids)) == (0, 3)
    assert engine.kv.num_cached_tokens(PREFIX, "s") == 0
    engine.kv.publish_reserved(reserved)
    engine.scheduler.release_prefix(reserved)
    assert engine.kv.num_cached_tokens(PREFIX, "s") == 12
    assert engine.kv.num_cached_tokens(PREFIX, "t") == 0
    engine.add("a", (*PREFIX, 99))
    step = engine.step()
    assert step.started[0].block_ids[:3] == tuple(reserved.block_ids)
    assert step.starts == (12,)


def test_a_prefix_of_which_a_part_is_cached_reserves_the_rest(engine):
    engine.add("a", PREFIX[:8]).run()
    reserved = engine.scheduler.reserve_prefix(PREFIX, "s")
    assert (reserved.num_cached, len(reserved.block_ids)) == (2, 3)
    engine.scheduler.check()
    engine.kv.publish_reserved(reserved)
    engine.scheduler.release_prefix(reserved)
    assert engine.kv.num_cached_tokens(PREFIX, "s") == 12


def test_a_prefix_computed_here_meanwhile_keeps_its_own_blocks(engine):
    reserved = engine.scheduler.reserve_prefix(PREFIX, "s")
    engine.add("a", PREFIX).run()
    engine.kv.publish_reserved(reserved)
    engine.scheduler.release_prefix(reserved)
    engine.scheduler.check()
    assert engine.kv.num_cached_tokens(PREFIX, "s") == 12


def test_a_reservation_that_is_given_up_leaves_nothing(engine):
    engine.scheduler.release_prefix(engine.scheduler.reserve_prefix(PREFIX, "s"))
    engine.scheduler.check()
    assert engine.kv.num_free == LIMITS.num_blocks
    assert engine.kv.num_cached_tokens(PREFIX, "s") == 0


def test_a_request_waits_for_blocks_of_a_transfer_and_does_not_fail(engine):
    engine.add("cached", [9] * 4).run()
    engine.events.clear()
    reserved = engine.scheduler.reserve_prefix(tuple(range(100, 116)), "s")
    engine.add("a", range(1, 24)).run(5)
    assert engine.scheduler.num_waiting == 1
    assert not engine.errors()
    assert engine.scheduler.reserve_prefix((1,) * 8, "s") is None, "requests that wait for blocks go first"
    assert engine.scheduler.hold_prefix((9,) * 4, "s") is None
    engine.scheduler.release_prefix(reserved)
    engine.run()
    assert [event.finish_reason.value for event in engine.events] == ["length"]


def test_a_request_that_grows_waits_for_blocks_of_a_transfer_and_does_not_fail(engine):
    engine.add("a", range(1, 16), max_tokens=10).step()
    reserved = engine.scheduler.reserve_prefix(tuple(range(100, 116)), "s")
    assert reserved is not None
    engine.run(6)
    assert not engine.errors()
    assert engine.scheduler.num_waiting == 1, "it was preempted"
    engine.scheduler.release_prefix(reserved)
    engine.run()
    assert not engine.errors()
    assert not engine.scheduler.has_work


def test_the_digest_of_the_blocks_is_the_digest_of_the_reference(engine):
    engine.add("a", PREFIX).run()
    chain = BlockHashChain("s")
    chain.extend(PREFIX, 3, SIZE)
    assert engine.kv.hold(PREFIX, "s").hashes.digests[-1] == chain.digests[-1]
