"""A step that does not fit into memory fails one request, the largest, and does not change the others'
tokens.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from quire_server.core.config import SpeculationConfig, SpeculativeMethod
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import OUT_OF_MEMORY
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.tiny_model import write

PROMPTS = [[5 * i + j for j in range(3 + i)] for i in range(5)]
LONG = list(range(90))


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return load(write(tmp_path_factory.mktemp("models") / "tiny"))


def limit_tokens(runner, monkeypatch, most_tokens):
    """Fail steps with more tokens by allocating 1 EiB; returns the token counts of the failed steps."""
    compute, failed_calls = runner._forward, []

    def hungry(step, spans):
        if step.total_tokens > most_tokens:
            failed_calls.append(step.total_tokens)
            torch.empty(1 << 60, dtype=torch.uint8)
        return compute(step, spans)

    monkeypatch.setattr(runner, "_forward", hungry)
    return failed_calls


@pytest.mark.parametrize("place", range(len(PROMPTS) + 1))
def test_the_largest_request_fails_and_the_others_of_its_step_answer_as_if_alone(runner, monkeypatch, place):
    alone = [InProcessEngine(runner).generate([prompt], greedy(12))[0] for prompt in PROMPTS]
    failed_calls = limit_tokens(runner, monkeypatch, 60)
    engine = InProcessEngine(runner)
    prompts = [*PROMPTS[:place], LONG, *PROMPTS[place:]]
    for name, prompt in enumerate(prompts):
        engine.scheduler.add(Request(str(name), tuple(prompt), greedy(12), 0.0))
    answers, errors = {}, {}
    while (step := engine.scheduler.schedule()) is not None:
        # Drafts must not depend on how fast this machine computes them.
        result = replace(runner.run(step), draft_seconds=0.0)
        for event in engine.scheduler.commit(step, result):
            answers.setdefault(event.request_id, []).extend(event.token_ids)
            if event.error is not None:
                errors[event.request_id] = event.error
    engine.scheduler.check()
    assert len(failed_calls) == 1, "the allocation failed for real"
    assert errors == {str(place): OUT_OF_MEMORY}
    assert [answers[str(name)] for name in range(len(prompts)) if name != place] == alone


def test_sampled_neighbours_keep_their_tokens_too(runner, monkeypatch):
    sampled = SamplingParams(12, temperature=1.0, seed=7, ignore_eos=True)
    alone = InProcessEngine(runner).generate([PROMPTS[4]], sampled)[0]
    limit_tokens(runner, monkeypatch, 60)
    engine = InProcessEngine(runner)
    for name, prompt in (("long", LONG), ("short", PROMPTS[4])):
        engine.scheduler.add(Request(name, tuple(prompt), sampled, 0.0))
    tokens = []
    while (step := engine.scheduler.schedule()) is not None:
        for event in engine.scheduler.commit(step, runner.run(step)):
            tokens += event.token_ids if event.request_id == "short" else ()
    assert tokens == alone


def test_only_as_many_requests_fail_as_do_not_fit(runner, monkeypatch):
    failed_calls = limit_tokens(runner, monkeypatch, 3)
    engine = InProcessEngine(runner)
    for name in range(5):
        engine.scheduler.add(Request(str(name), (name + 1,), greedy(8), 0.0))
    errors = {}
    while (step := engine.scheduler.schedule()) is not None:
        for event in engine.scheduler.commit(step, runner.run(step)):
            if event.finish_reason is not None:
                errors[event.request_id] = event.error
    assert len(failed_calls) == 2
    assert list(errors.values()).count(None) == 3
    assert list(errors.values()).count(OUT_OF_MEMORY) == 2


def test_other_errors_still_end_the_process(runner, monkeypatch):
    def broken(step, spans):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(runner, "_forward", broken)
    engine = InProcessEngine(runner)
    with pytest.raises(RuntimeError, match="shapes"):
        engine.generate([[1, 2]], greedy(2))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """A model that is its own draft model."""
    directory = write(tmp_path_factory.mktemp("models") / "drafting")
    return load(directory, speculative_model=directory)


def fail_once(owner, name, monkeypatch, is_due):
    """Fail the first call for which ``is_due`` by allocating 1 EiB; returns its argument in a list."""
    compute, failed_calls = getattr(owner, name), []

    def hungry(first, *rest):
        if not failed_calls and is_due(first):
            failed_calls.append(first)
            torch.empty(1 << 60, dtype=torch.uint8)
        return compute(first, *rest)

    monkeypatch.setattr(owner, name, hungry)
    return failed_calls


def sampling_params(method, number):
    """For n-gram drafts the output is biased to one repeated token, which makes the drafts right."""
    bias = () if method is SpeculativeMethod.DRAFT_MODEL else ((100 + number, 100.0),)
    return greedy(60, logit_bias=bias)


def answers_alone(runner, method):
    """What each prompt gets without drafts and without other requests."""
    engines = [InProcessEngine(runner) for _ in PROMPTS]
    return [
        engine.generate([prompt], sampling_params(method, number))[0]
        for number, (engine, prompt) in enumerate(zip(engines, PROMPTS, strict=True))
    ]


def drafted_answers(runner, method, *, late=()):
    """(answers, errors, accepted draft tokens); the late prompt is added once there are drafts."""
    engine = InProcessEngine(runner, speculation=SpeculationConfig(method, 4, lookup_min=1))
    answers, errors, late = {}, {}, list(late)
    for name, prompt in enumerate(PROMPTS):
        engine.scheduler.add(Request(str(name), tuple(prompt), sampling_params(method, name), 0.0))
    while (step := engine.scheduler.schedule()) is not None:
        # Drafts must not depend on how fast this machine computes them.
        result = replace(runner.run(step), draft_seconds=0.0)
        for event in engine.scheduler.commit(step, result):
            answers.setdefault(event.request_id, []).extend(event.token_ids)
            if event.error is not None:
                errors[event.request_id] = event.error
        if late and engine.scheduler.stats.speculation.drafts > 5:
            engine.scheduler.add(Request("late", tuple(late.pop()), greedy(60), 0.0))
    engine.scheduler.check()
    return answers, errors, engine.scheduler.stats.speculation.accepted_tokens


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", [SpeculativeMethod.NGRAM, SpeculativeMethod.DRAFT_MODEL])
@pytest.mark.parametrize("late", [(), (LONG,)], ids=["drafts alone", "a long prompt beside drafts"])
def test_a_step_with_drafts_loses_one_request_and_the_others_keep_theirs(drafting, monkeypatch, method, late):
    alone = answers_alone(drafting, method)

    def is_due(step):
        num_drafted = sum(samples > 1 for samples in step.samples)
        return num_drafted >= 2 and (not late or max(step.num_tokens) >= len(LONG))

    failed_calls = fail_once(drafting, "_forward", monkeypatch, is_due)
    answers, errors, accepted = drafted_answers(drafting, method, late=late)
    assert len(failed_calls) == 1, "the allocation failed for real, and beside drafts"
    assert list(errors.values()) == [OUT_OF_MEMORY]
    assert not late or errors.keys() == {"late"}
    for name, expected in enumerate(alone):
        if str(name) not in errors:
            assert answers[str(name)] == expected
    assert accepted > 0


def test_without_memory_for_the_draft_model_there_are_no_drafts_and_no_failures(drafting, monkeypatch):
    alone = answers_alone(drafting, SpeculativeMethod.DRAFT_MODEL)
    draft = drafting._draft_model
    passes = itertools.count()
    failed_calls = fail_once(
        draft, "_compute", monkeypatch, lambda chunks: len(chunks) >= 2 and next(passes) >= 5
    )  # not the first pass: there are drafts by then
    answers, errors, accepted = drafted_answers(drafting, SpeculativeMethod.DRAFT_MODEL)
    assert len(failed_calls) == 1
    assert errors == {}
    assert [answers[str(name)] for name in range(len(PROMPTS))] == alone
    assert accepted > 100, "drafts came back"
