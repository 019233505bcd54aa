"""Random arrivals, aborts and steps over tiny pools: accounts hold, work progresses, answers are the
model's own.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire_server.core.config import Batching, SpeculationConfig, SpeculativeMethod
from quire_server.core.policy import CLASSES, TOP_PRIORITY, Policy
from quire_server.core.preemption import may_interrupt
from quire_server.core.scheduler import Scheduler
from tests.examples import examples
from tests.server.core.fake_runner import EOS, FakeRunner, answer, config, is_error, request

# Steps without a new token: a prompt of 24 in chunks of one, for each of 5 rows.
PATIENCE = 120


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 20),
        caching=st.booleans(),
        chunked=st.booleans(),
        policy=st.sampled_from(Policy),
        batching=st.sampled_from([Batching.CONTINUOUS, Batching.CONTINUOUS, Batching.STATIC]),
        method=st.sampled_from(SpeculativeMethod),
        num_drafts=st.integers(1, 8),
        accuracy=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        chunked: bool,
        policy: Policy,
        batching: Batching,
        method: SpeculativeMethod,
        num_drafts: int,
        accuracy: float,
    ) -> None:
        drafting = SpeculationConfig(method, num_drafts, lookup_min=1)
        self.config = config(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            max_model_len=24,
            free_block_reserve=0.1,
            policy=policy,
            batching=batching,
            speculation=None if method is SpeculativeMethod.NONE else drafting,
        )
        self.scheduler = Scheduler(self.config, eos_token_ids=[EOS])
        self.runner = FakeRunner(self.config)
        self.runner.accuracy = accuracy
        self.live: dict[str, tuple[list[int], int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.count = self.steps_since_news = 0
        self.now = 0.0
        self.waited, self.patience = "", PATIENCE

    @rule(
        shared=st.integers(0, 20),  # length of the prefix that all prompts have in common
        own=st.lists(st.integers(0, 2), max_size=6),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from(["", "x"]),
        priority=st.sampled_from([*CLASSES.values(), 1, TOP_PRIORITY]),
        seconds=st.sampled_from([0.0, 3.0, 60.0]),
    )
    def arrive(
        self, shared: int, own: list[int], max_tokens: int, salt: str, priority: int, seconds: float
    ) -> None:
        self.now += seconds
        prompt = [*range(shared), *own]
        name = f"r{self.count}"
        self.count += 1
        self.live[name], self.tokens[name] = (prompt, max_tokens), []
        self.scheduler.add(request(name, prompt, max_tokens, self.now, cache_salt=salt, priority=priority))

    @rule(
        shared=st.integers(0, 20),
        num_low=st.integers(1, 5),
        num_steps=st.integers(0, 8),
        length=st.integers(1, 20),
        priority=st.sampled_from([CLASSES["high"], TOP_PRIORITY]),
    )
    def arrive_urgently(self, shared: int, num_low: int, num_steps: int, length: int, priority: int) -> None:
        """An urgent arrival while low-priority requests with a shared prefix run."""
        for place in range(num_low):
            self.arrive(shared, [place], 12, "", CLASSES["low"], 0.0)
            self.step(abort_in_flight=False)
        for _ in range(num_steps):
            self.step(abort_in_flight=False)
        self.arrive(0, [3] * length, 2, "", priority, 0.0)
        self.step(abort_in_flight=False)

    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        if self.live:
            name = sorted(self.live)[choice % len(self.live)]
            self.scheduler.abort(name)
            del self.live[name]

    @rule(abort_in_flight=st.booleans())
    def step(self, abort_in_flight: bool) -> None:
        head, must_start = self.head()
        step = self.scheduler.schedule()
        assert (step is None) == (not self.live)
        started = {row.request_id for row in step.started} if step is not None else set[str]()
        waits_on = head and head == self.waited and head not in started
        self.patience = self.patience - 1 if waits_on else PATIENCE
        assert self.patience, "the most urgent one waits, and no other starts"
        self.waited = head
        assert not must_start or head in started, "it could have started"
        if step is None:
            return
        result = self.runner.run(step)
        if abort_in_flight and self.live:
            self.abort(0)
        events = self.scheduler.commit(step, result)
        assert step.rows or events or abort_in_flight, "a step that did nothing"
        self.steps_since_news = 0 if events else self.steps_since_news + 1
        assert self.steps_since_news < PATIENCE, "work, and no progress"
        for event in events:
            prompt, max_tokens = self.live[event.request_id]
            self.tokens[event.request_id].extend(event.token_ids)
            if event.finish_reason is None:
                continue
            del self.live[event.request_id]
            said = self.tokens[event.request_id]
            assert said == answer(prompt, len(said))
            capacity = self.config.num_blocks * self.config.block_size
            if is_error(event):
                assert not prompt or len(prompt) >= 24 or len(prompt) + max_tokens > capacity
            else:
                assert len(said) == min(max_tokens, 24 - len(prompt))

    def head(self) -> tuple[str, bool]:
        """The most urgent waiting request, and whether it must start now (all others are less urgent)."""
        first, running = self.scheduler._queue.waiting.first(), self.scheduler._queue.running.sequences
        if first is None:
            return "", False
        all_less_urgent = all(
            other.order > first.order and other.request.priority > first.request.priority for other in running
        )
        return first.request.request_id, (
            may_interrupt(first, self.config)
            and all_less_urgent
            and len(running) < self.config.token_budget
            and len(first.tokens) <= self.config.num_blocks * self.config.block_size
        )

    @invariant()
    def check_accounts(self) -> None:
        self.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if not self.live:
                break
            self.step(abort_in_flight=False)
        assert not self.live, "no progress"
        assert self.scheduler.schedule() is None and self.scheduler.kv_utilization == 0
        self.scheduler.check()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
