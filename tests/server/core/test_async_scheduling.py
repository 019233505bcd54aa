"""Async scheduling (a step is scheduled while the one before is computed) changes no answer and leaks no
block.
"""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_server.core.config import SpeculationConfig, SpeculativeMethod
from quire_server.core.policy import CLASSES, Policy
from quire_server.core.request import FinishReason, Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import TokenEvent
from quire_server.engine.engine_core import StepExecutor, StepPipeline
from tests.examples import examples
from tests.server.core.fake_device import FakeDevice, FakeHost
from tests.server.core.fake_runner import EOS, FakeRunner, answer, config, request

ARRIVALS = st.tuples(
    st.integers(0, 14),  # length of the prefix that all prompts have in common
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.integers(1, 9),  # max_tokens
    st.sets(st.integers(0, 49), max_size=12),  # stop tokens, which the model says now and then
    st.sampled_from([0, 0, CLASSES["high"]]),
)
SCRIPTS = st.lists(st.one_of(ARRIVALS, st.integers(0, 9), st.just("step"), st.just("step")), max_size=40)


class PipelineRun:
    """A step pipeline on a fake device or a fake host, with the answers so far."""

    def __init__(self, limits: SchedulerConfig, *, ahead: bool, executor: StepExecutor | None = None) -> None:
        self.scheduler = Scheduler(limits, eos_token_ids=[EOS])
        self.device = FakeDevice(FakeRunner(limits), max(2, limits.pipeline_size))
        default = self.device if ahead else FakeHost(FakeRunner(limits))
        self.pipeline = StepPipeline(self.scheduler, executor or default)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenEvent] = {}

    def add(self, new: Request) -> None:
        self.tokens[new.request_id] = []
        self.scheduler.add(new)

    def step(self) -> None:
        if not self.scheduler.has_work:
            return
        advanced = self.pipeline.advance()
        self.scheduler.check()
        for event in advanced[1] if advanced is not None else ():
            assert event.request_id not in self.ends, "an event after the last one"
            self.tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                self.ends[event.request_id] = event

    def drain(self) -> None:
        for _ in range(1000):
            if not self.scheduler.has_work:
                assert self.scheduler.num_unaccounted_blocks == 0
                assert self.scheduler.kv_utilization == 0
                return
            self.step()
        raise AssertionError("no end in sight")

    def play(self, script: list[object]) -> set[str]:
        """Runs the script and returns the ids of aborted requests."""
        aborted = set[str]()
        for act in script:
            if act == "step":
                self.step()
            elif isinstance(act, int):
                living = sorted(self.tokens.keys() - self.ends.keys() - aborted)
                if living:
                    name = living[act % len(living)]
                    self.scheduler.abort(name)
                    aborted.add(name)
            else:
                shared, own, max_tokens, stops, priority = act  # type: ignore[misc]  # a tuple of ARRIVALS
                sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(sorted(stops)))
                name = f"r{len(self.tokens)}"
                self.add(Request(name, (*range(shared), *own), sampling, 0.0, priority=priority))
        self.drain()
        return aborted


def scheduler_configs(draw: st.DrawFn) -> SchedulerConfig:
    return config(
        num_blocks=draw(st.integers(3, 24)),
        block_size=draw(st.sampled_from([1, 2, 4])),
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.integers(1, 20)),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=draw(st.booleans()),
        max_model_len=24,
        policy=draw(st.sampled_from(Policy)),
    )


@settings(max_examples=examples(300), deadline=None)
@given(st.composite(scheduler_configs)(), SCRIPTS)
def test_answers_equal_those_of_synchronous_scheduling(limits: SchedulerConfig, script: list[object]) -> None:
    ahead, oracle = PipelineRun(limits, ahead=True), PipelineRun(limits, ahead=False)
    aborted = ahead.play(script)
    oracle.play([act for act in script if not isinstance(act, int)])
    for name, tokens in ahead.tokens.items():
        expected = oracle.tokens[name]
        if name in aborted:
            assert tokens == expected[: len(tokens)]
            continue
        assert tokens == expected
        assert ahead.ends[name].finish_reason is oracle.ends[name].finish_reason
        assert ahead.ends[name].error == oracle.ends[name].error


@pytest.fixture
def run() -> Iterator[PipelineRun]:
    one = PipelineRun(config(), ahead=True)
    yield one
    one.drain()


def test_during_decodes_the_device_always_has_the_next_step(run: PipelineRun) -> None:
    for name in "abc":
        run.add(request(name, [ord(name)], max_tokens=20))
    run.drain()
    assert run.device.depths[0] == 1 and set(run.device.depths[1:]) == {2}
    assert run.tokens == {name: answer([ord(name)], 20) for name in "abc"}
    assert len(run.device.depths) == 20, "no step too many: where an answer ends by its length is known"


def test_prefill_chunks_and_new_requests_do_not_wait_for_results(run: PipelineRun) -> None:
    run.add(request("first", [1], max_tokens=12))
    run.step()
    run.add(request("long", range(40), max_tokens=3))
    run.step()
    run.drain()
    assert set(run.device.depths[1:]) == {2}
    assert run.tokens == {"first": answer([1], 12), "long": answer(range(40), 3)}


def test_tokens_computed_after_a_stop_token_are_dropped(run: PipelineRun) -> None:
    full = answer([5], 8)
    stop = SamplingParams(max_tokens=8, stop_token_ids=(full[3],))
    run.add(Request("a", (5,), stop, 0.0))
    for _ in range(4):
        run.step()
    assert run.tokens["a"] == full[:4] and run.ends["a"].finish_reason is FinishReason.STOP
    assert run.scheduler.has_work, "a step for it is still under way"
    run.add(request("b", [6], max_tokens=4))  # takes the row, and the blocks
    run.drain()
    assert run.tokens == {"a": full[:4], "b": answer([6], 4)}


def test_a_step_ahead_preempts_nothing() -> None:
    run = PipelineRun(
        config(num_blocks=4, block_size=2, max_model_len=8, enable_prefix_caching=False), ahead=True
    )
    for name in "abc":
        run.add(request(name, [ord(name)], max_tokens=6))
    run.drain()
    assert run.scheduler.stats.preemptions > 0
    assert run.tokens == {name: answer([ord(name)], 6) for name in "abc"}


def test_an_urgent_request_preempts_although_a_step_is_ahead() -> None:
    run = PipelineRun(config(max_num_seqs=1, policy=Policy.PRIORITY), ahead=True)
    run.add(request("low", [1], max_tokens=30))
    for _ in range(3):
        run.step()
    run.add(request("high", [2], max_tokens=2, priority=CLASSES["high"]))
    for _ in range(5):
        run.step()
    assert "high" in run.ends and "low" not in run.ends
    run.drain()
    assert run.tokens == {"low": answer([1], 30), "high": answer([2], 2)}


@pytest.mark.parametrize(
    "limits",
    [
        config(num_host_slots=4),
        config(speculation=SpeculationConfig(SpeculativeMethod.NGRAM, 4, lookup_min=1)),
    ],
    ids=["tiers", "drafts"],
)
def test_a_step_whose_schedule_depends_on_results_waits_for_them(limits: SchedulerConfig) -> None:
    run = PipelineRun(limits, ahead=True)
    run.add(request("a", [3], max_tokens=9))
    run.drain()
    assert set(run.device.depths) == {1}
    assert run.tokens == {"a": answer([3], 9)}
