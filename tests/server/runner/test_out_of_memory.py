"""A step that does not fit into memory costs one request, the largest, and the others nothing at all."""

import pytest
import torch

from quire_server.core.limits import SpeculationConfig, SpeculativeMethod
from quire_server.core.request import Request, SamplingParams
from quire_server.core.step import OUT_OF_MEMORY
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.tiny_model import write

PROMPTS = [[5 * i + j for j in range(3 + i)] for i in range(5)]
LONG = list(range(90))


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return load(write(tmp_path_factory.mktemp("models") / "tiny"))


def starve(runner, monkeypatch, most_tokens):
    """The model asks for 1 EiB, more than any address space, in every step with more tokens; the strikes."""
    compute, strikes = runner._forward, []

    def hungry(step, spans):
        if step.total_tokens > most_tokens:
            strikes.append(step.total_tokens)
            torch.empty(1 << 60, dtype=torch.uint8)
        return compute(step, spans)

    monkeypatch.setattr(runner, "_forward", hungry)
    return strikes


@pytest.mark.parametrize("place", range(len(PROMPTS) + 1))
def test_the_largest_request_fails_and_the_others_of_its_step_answer_as_if_alone(runner, monkeypatch, place):
    alone = [InProcessEngine(runner).generate([prompt], greedy(12))[0] for prompt in PROMPTS]
    strikes = starve(runner, monkeypatch, 60)
    engine = InProcessEngine(runner)
    prompts = [*PROMPTS[:place], LONG, *PROMPTS[place:]]
    for name, prompt in enumerate(prompts):
        engine.scheduler.add(Request(str(name), tuple(prompt), greedy(12), 0.0))
    answers, errors = {}, {}
    while (step := engine.scheduler.schedule()) is not None:
        for event in engine.scheduler.commit(step, runner.run(step)):
            answers.setdefault(event.request_id, []).extend(event.token_ids)
            if event.error is not None:
                errors[event.request_id] = event.error
    engine.scheduler.check()
    assert len(strikes) == 1, "the allocation failed for real"
    assert errors == {str(place): OUT_OF_MEMORY}
    assert [answers[str(name)] for name in range(len(prompts)) if name != place] == alone


def test_sampled_neighbours_keep_their_tokens_too(runner, monkeypatch):
    sampled = SamplingParams(12, temperature=1.0, seed=7, ignore_eos=True)
    alone = InProcessEngine(runner).generate([PROMPTS[4]], sampled)[0]
    starve(runner, monkeypatch, 60)
    engine = InProcessEngine(runner)
    for name, prompt in (("long", LONG), ("short", PROMPTS[4])):
        engine.scheduler.add(Request(name, tuple(prompt), sampled, 0.0))
    tokens = []
    while (step := engine.scheduler.schedule()) is not None:
        for event in engine.scheduler.commit(step, runner.run(step)):
            tokens += event.token_ids if event.request_id == "short" else ()
    assert tokens == alone


def test_as_many_fail_as_do_not_fit_and_no_more(runner, monkeypatch):
    strikes = starve(runner, monkeypatch, 3)
    engine = InProcessEngine(runner)
    for name in range(5):
        engine.scheduler.add(Request(str(name), (name + 1,), greedy(8), 0.0))
    errors = {}
    while (step := engine.scheduler.schedule()) is not None:
        for event in engine.scheduler.commit(step, runner.run(step)):
            if event.finish_reason is not None:
                errors[event.request_id] = event.error
    assert len(strikes) == 2
    assert list(errors.values()).count(None) == 3
    assert list(errors.values()).count(OUT_OF_MEMORY) == 2


def test_what_is_no_lack_of_memory_still_ends_the_process(runner, monkeypatch):
    def broken(step, spans):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(runner, "_forward", broken)
    engine = InProcessEngine(runner)
    with pytest.raises(RuntimeError, match="shapes"):
        engine.generate([[1, 2]], greedy(2))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """A model that is its own draft."""
    directory = write(tmp_path_factory.mktemp("models") / "drafting")
    return load(directory, speculative_model=directory)


def starve_once(owner, name, monkeypatch, is_due):
    """One call for which there is no memory, the first that ``is_due``; the strikes."""
    compute, strikes = getattr(owner, name), []

    def hungry(first, *rest):
        if not strikes and is_due(first):
            strikes.append(first)
            torch.empty(1 << 60, dtype=torch.uint8)
        return compute(first, *rest)

    monkeypatch.setattr(owner, name, hungry)
    return strikes


def asked(method, number):
    """With a draft model, whatever the model says; else a token of its own, whose repetition is foretold."""
    bias = () if method is SpeculativeMethod.DRAFT_MODEL else ((100 + number, 100.0),)
    return greedy(60, logit_bias=bias)


def each_alone(runner, method):
    """What each prompt gets without drafts, and with nobody beside it."""
    engines = [InProcessEngine(runner) for _ in PROMPTS]
    return [
        engine.generate([prompt], asked(method, number))[0]
        for number, (engine, prompt) in enumerate(zip(engines, PROMPTS, strict=True))
    ]


def drafted_answers(runner, method, *, late=()):
    """What each prompt got, the late one added once there are drafts; the errors, and what drafts brought."""
    engine = InProcessEngine(runner, speculation=SpeculationConfig(method, 4, lookup_min=1))
    answers, errors, late = {}, {}, list(late)
    for name, prompt in enumerate(PROMPTS):
        engine.scheduler.add(Request(str(name), tuple(prompt), asked(method, name), 0.0))
    while (step := engine.scheduler.schedule()) is not None:
        for event in engine.scheduler.commit(step, runner.run(step)):
            answers.setdefault(event.request_id, []).extend(event.token_ids)
            if event.error is not None:
                errors[event.request_id] = event.error
        if late and engine.scheduler.stats.speculation.drafts > 5:
            engine.scheduler.add(Request("late", tuple(late.pop()), greedy(60), 0.0))
    engine.scheduler.check()
    return answers, errors, engine.scheduler.stats.speculation.accepted_tokens


@pytest.mark.parametrize("method", [SpeculativeMethod.NGRAM, SpeculativeMethod.DRAFT_MODEL])
@pytest.mark.parametrize("late", [(), (LONG,)], ids=["drafts alone", "a long prompt beside drafts"])
def test_a_step_with_drafts_loses_one_request_and_the_others_keep_theirs(drafting, monkeypatch, method, late):
    alone = each_alone(drafting, method)

    def is_due(step):
        num_drafted = sum(samples > 1 for samples in step.samples)
        return num_drafted >= 2 and (not late or max(step.num_tokens) >= len(LONG))

    strikes = starve_once(drafting, "_forward", monkeypatch, is_due)
    answers, errors, accepted = drafted_answers(drafting, method, late=late)
    assert len(strikes) == 1, "the allocation failed for real, and beside drafts"
    assert list(errors.values()) == [OUT_OF_MEMORY]
    assert not late or errors.keys() == {"late"}
    for name, expected in enumerate(alone):
        if str(name) not in errors:
            assert answers[str(name)] == expected
    assert accepted > 0


def test_without_memory_for_the_draft_model_there_are_no_drafts_and_no_failures(drafting, monkeypatch):
    alone = each_alone(drafting, SpeculativeMethod.DRAFT_MODEL)
    draft = drafting._draft_model
    strikes = starve_once(draft, "_compute", monkeypatch, lambda pieces: len(pieces) >= 2 and draft._guesses)
    answers, errors, accepted = drafted_answers(drafting, SpeculativeMethod.DRAFT_MODEL)
    assert len(strikes) == 1
    assert errors == {}
    assert [answers[str(name)] for name in range(len(PROMPTS))] == alone
    assert accepted > 100, "drafts came back"
