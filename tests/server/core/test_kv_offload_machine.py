"""Random bursts of prompts with shared prefixes on a KV cache that is too small for them, with host and disk
offload and their faults: whatever a tier loses, delays or corrupts, answers are right, the block counts are
consistent, and every request ends.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire_server.core.config import Batching, PreemptionMode
from quire_server.core.policy import CLASSES, TOP_PRIORITY, Policy
from quire_server.core.scheduler import Scheduler
from tests.examples import examples
from tests.server.core.fake_runner import EOS, FakeRunner, answer, config, is_error, request

LONGEST = 26
NUM_STEPS = 24


class OffloadMachine(RuleBasedStateMachine):
    @initialize(
        spare=st.integers(0, 3),
        block_size=st.sampled_from([2, 3]),
        host=st.sampled_from([3, 8, 40]),
        disk=st.sampled_from([0, 4, 60]),
        lag=st.integers(0, 2),
        mode=st.sampled_from(PreemptionMode),
        caching=st.sampled_from([True, True, False]),
        policy=st.sampled_from(Policy),
        batching=st.sampled_from([Batching.CONTINUOUS, Batching.CONTINUOUS, Batching.STATIC]),
    )
    def begin(
        self,
        spare: int,
        block_size: int,
        host: int,
        disk: int,
        lag: int,
        mode: PreemptionMode,
        caching: bool,
        policy: Policy,
        batching: Batching,
    ) -> None:
        self.config = config(
            num_blocks=-(-LONGEST // block_size) + spare,
            block_size=block_size,
            max_num_seqs=5,
            max_num_batched_tokens=12,
            max_model_len=LONGEST,
            num_host_slots=host,
            num_disk_slots=disk,
            preemption_mode=mode,
            enable_prefix_caching=caching,
            max_pinned_share=0.3,
            policy=policy,
            batching=batching,
        )
        self.now = 0.0
        self.scheduler = Scheduler(self.config, eos_token_ids=[EOS], clock=lambda: self.now)
        self.runner = FakeRunner(self.config)
        self.runner.disk.lag = lag
        self.live: dict[str, tuple[list[int], int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.count = 0

    @rule(
        families=st.lists(st.integers(0, 3), min_size=1, max_size=5),
        length=st.integers(4, 14),
        max_tokens=st.integers(1, 12),
        ttl=st.sampled_from([0.0, 0.0, 5.0]),
        steps=st.integers(1, NUM_STEPS),
        fault=st.sampled_from(["", "", "", "corrupt", "full"]),
        priority=st.sampled_from([*CLASSES.values(), TOP_PRIORITY]),
    )
    def burst(
        self,
        families: list[int],
        length: int,
        max_tokens: int,
        ttl: float,
        steps: int,
        fault: str,
        priority: int,
    ) -> None:
        for family in families:
            prompt = [family * 10 + place % 7 for place in range(length)]
            name = f"r{self.count}"
            self.count += 1
            self.live[name], self.tokens[name] = (prompt, max_tokens), []
            salt = str(family % 2)
            self.scheduler.add(
                request(name, prompt, max_tokens, self.now, cache_salt=salt, cache_ttl=ttl, priority=priority)
            )
        self.runner.corrupt_loads, self.runner.disk.full = fault == "corrupt", fault == "full"
        self.run(steps)
        self.runner.corrupt_loads = self.runner.disk.full = False

    @rule(choice=st.integers(0, 1000), steps=st.integers(0, 3))
    def abort(self, choice: int, steps: int) -> None:
        if self.live:
            name = sorted(self.live)[choice % len(self.live)]
            self.scheduler.abort(name)
            del self.live[name]
        self.run(steps)

    @rule(seconds=st.floats(0, 9))
    def advance_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(steps=st.integers(0, 3))
    def reset_the_cache(self, steps: int) -> None:
        self.scheduler.kv.reset()
        self.run(steps)

    @precondition(lambda self: self.config.num_disk_slots and self.count > 20)
    @rule()
    def break_the_disk(self) -> None:
        self.runner.disk.broken = True

    @invariant()
    def check_accounts(self) -> None:
        self.scheduler.check()

    def run(self, max_steps: int) -> None:
        idle = 0
        for _ in range(max_steps):
            step = self.scheduler.schedule()
            assert (step is None) == (not self.live)
            if step is None:
                return
            events = list(self.scheduler.commit(step, self.runner.run(step)))
            idle = 0 if step.rows or events else idle + 1
            # Idle steps: once for copies that were already running, once for the request's own copy.
            assert idle <= 2 * (self.runner.disk.lag + 1), "the request waits although no copy is running"
            for event in events:
                self.record(event.request_id, event.token_ids, event.finish_reason is not None)
                assert not is_error(event)

    def record(self, name: str, token_ids: tuple[int, ...], is_last: bool) -> None:
        self.tokens[name].extend(token_ids)
        prompt, max_tokens = self.live[name]
        assert self.tokens[name] == answer(prompt, len(self.tokens[name]))
        if is_last:
            assert len(self.tokens[name]) == min(max_tokens, LONGEST - len(prompt))
            del self.live[name]

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.run(3000)
        assert not self.live, "no progress"
        self.scheduler.kv.release_pins()
        assert self.scheduler.kv_utilization == 0
        self.scheduler.check()


TestOffload = OffloadMachine.TestCase
TestOffload.settings = settings(max_examples=examples(150), stateful_step_count=25, deadline=None)
