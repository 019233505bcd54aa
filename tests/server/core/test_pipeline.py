"""Steps of a pipeline: several in flight, each with requests of its own, change no answer."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_server.core import pipeline
from quire_server.core.config import SpeculationConfig, SpeculativeMethod
from quire_server.core.pipeline import SlotLoad
from quire_server.core.policy import CLASSES, Policy
from quire_server.core.scheduler import SchedulerConfig
from tests.examples import examples
from tests.server.core.fake_runner import FakeRunner, answer, config, request
from tests.server.core.fake_stages import FakeStages
from tests.server.core.test_async_scheduling import SCRIPTS, PipelineRun, scheduler_configs


@st.composite
def pipelined(draw: st.DrawFn) -> tuple[SchedulerConfig, SchedulerConfig]:
    """Limits of a pipeline, and the same ones of one stage."""
    stages, one = draw(st.integers(2, 4)), scheduler_configs(draw)
    return SchedulerConfig(
        **{name: getattr(one, name) for name in one.__slots__} | {"pipeline_size": stages}
    ), one


@settings(max_examples=examples(300), deadline=None)
@given(pipelined(), SCRIPTS)
def test_answers_equal_those_of_one_stage(
    limits: tuple[SchedulerConfig, SchedulerConfig], script: list[object]
) -> None:
    several, one = PipelineRun(limits[0], ahead=True), PipelineRun(limits[1], ahead=False)
    aborted = several.play(script)
    one.play([act for act in script if not isinstance(act, int)])
    for name, tokens in several.tokens.items():
        expected = one.tokens[name]
        if name in aborted:
            assert tokens == expected[: len(tokens)]
            continue
        assert tokens == expected
        assert several.ends[name].finish_reason is one.ends[name].finish_reason
        assert several.ends[name].error == one.ends[name].error


def run_of(stages: int, **limits: object) -> PipelineRun:
    return PipelineRun(config(pipeline_size=stages, max_num_seqs=8, **limits), ahead=True)


@pytest.mark.parametrize(("streams", "stages"), [(1, 3), (2, 3), (3, 3), (7, 3), (8, 2), (5, 4)])
def test_decodes_are_spread_evenly_over_as_many_steps_as_there_are_stages(streams: int, stages: int) -> None:
    run = run_of(stages)
    for number in range(streams):
        run.add(request(str(number), [number], max_tokens=20))
    for _ in range(3 * stages):
        run.step()
    assert max(run.device.depths) == min(streams, stages)
    steps = [run.device.steps[-1 - index] for index in range(min(streams, stages))]
    rows = sorted(row for step in steps for row in step.rows)
    assert rows == sorted(set(rows)) and len(rows) == streams, "each request in one of them"
    counts = [len(step.rows) for step in steps]
    assert max(counts) - min(counts) <= 1
    run.drain()
    assert run.tokens == {str(number): answer([number], 20) for number in range(streams)}


@pytest.mark.parametrize("streams", [1, 2, 3, 7])
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (1.0, 2.0, 3.0)])
def test_stages_are_as_busy_as_the_formula_says(streams: int, seconds: tuple[float, ...]) -> None:
    limits = config(pipeline_size=3, max_num_seqs=8, num_blocks=200)
    stages = FakeStages(FakeRunner(limits), seconds)
    run = PipelineRun(limits, ahead=True, executor=stages)
    for number in range(streams):
        run.add(request(str(number), [number], max_tokens=60))
    for _ in range(10):
        run.step()
    began = stages.now
    for _ in range(30 * min(streams, 3)):
        run.step()
    # With stages of equal times it is min(1, streams / stages).
    balance = statistics.mean(seconds) / max(seconds)
    formula = min(1.0, streams * max(seconds) / sum(seconds)) * balance
    assert stages.utilisation(began, stages.now) == pytest.approx(formula, abs=0.01)


def test_when_the_requests_of_a_slot_end_the_others_are_spread_again() -> None:
    run = run_of(2)
    for number in range(8):
        run.add(request(str(number), [number], max_tokens=30))
    for _ in range(8):
        run.step()
    rows = run.device.steps[-1].rows
    assert len(rows) == 4
    for sequence in list(run.scheduler._queue.running.sequences):
        if sequence.row in rows:
            run.scheduler.abort(sequence.request.request_id)
    for _ in range(6):
        run.step()
    assert [len(step.rows) for step in run.device.steps[-2:]] == [2, 2]
    run.drain()


def test_a_new_request_goes_to_the_slot_with_fewest_tokens() -> None:
    run = run_of(2, max_num_batched_tokens=64, num_blocks=64)
    run.add(request("long", range(40), max_tokens=3))
    run.add(request("short", [1], max_tokens=3))
    run.step()
    first, second = run.device.steps[:2]
    assert ([row.request_id for row in first.started], [row.request_id for row in second.started]) == (
        ["long"],
        ["short"],
    )
    run.drain()


def test_a_request_is_in_one_step_at_a_time_and_urgent_ones_preempt() -> None:
    run = run_of(3, policy=Policy.PRIORITY, num_blocks=4)
    for name in "abc":
        run.add(request(name, [ord(name)], max_tokens=12))
    for _ in range(3):
        run.step()
    run.add(request("high", [2] * 8, max_tokens=2, priority=CLASSES["high"]))
    run.drain()
    assert run.scheduler.stats.preemptions > 0
    assert run.tokens == {name: answer([ord(name)], 12) for name in "abc"} | {"high": answer([2] * 8, 2)}


def test_drafts_and_tiers_have_one_step_with_all_requests() -> None:
    for limits in (
        {"num_host_slots": 4},
        {"speculation": SpeculationConfig(SpeculativeMethod.NGRAM, 4, lookup_min=1)},
    ):
        run = run_of(3, **limits)
        for name in "abc":
            run.add(request(name, [ord(name)], max_tokens=9))
        run.drain()
        assert set(run.device.depths) == {1}
        assert run.tokens == {name: answer([ord(name)], 9) for name in "abc"}


def test_surplus_decodes_move_to_the_emptiest_slots() -> None:
    def loads(*decodes: int) -> list[SlotLoad]:
        return [SlotLoad(count, count, False) for count in decodes]

    assert pipeline.moves(loads(7, 0, 0), 0) == [1, 2, 1, 2]
    assert pipeline.moves(loads(3, 2, 2), 0) == []
    assert pipeline.moves(loads(3, 3, 0), 1) == [2]
    assert pipeline.moves(loads(1, 0, 0), 0) == []


def test_slots_take_turns_and_empty_ones_come_last() -> None:
    loads = [SlotLoad(1, 1, False), SlotLoad(0, 0, False), SlotLoad(1, 9, True), SlotLoad(2, 2, False)]
    assert pipeline.candidates(loads, 0) == [3, 0, 1]
    assert pipeline.candidates(loads, 3) == [0, 3, 1]
    assert pipeline.admission_limit(loads, 1) == 1
    assert pipeline.admission_limit(loads, 0) == 0


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"pipeline_size": 3, "max_num_seqs": 1}, "--max-num-seqs 1 keeps at most 1 of 3 stages busy"),
        ({"pipeline_size": 3, "max_num_seqs": 3}, None),
        ({"pipeline_size": 1, "max_num_seqs": 1, "num_host_slots": 4}, None),
        ({"pipeline_size": 2, "num_host_slots": 4}, "2 stages take turns"),
    ],
)
def test_settings_that_leave_stages_idle_are_found_with_a_remedy(
    limits: dict[str, int], why: str | None
) -> None:
    found = pipeline.why_idle(config(**limits))
    assert (why in found and "--pipeline-parallel-size" in found) if why else not found
