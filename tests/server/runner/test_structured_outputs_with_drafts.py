"""Speculative decoding with grammars: the same answers with and without drafts, and drafts are accepted."""

import pytest

from quire_server.core.config import SpeculationConfig, SpeculativeMethod
from quire_server.core.request import FinishReason
from tests.server import tiny_model
from tests.server.runner.in_process import InProcessEngine, load
from tests.server.runner.test_structured_outputs import params

REPETITIVE = ("regex", "(abcabc, ){6}end")
FORMS = [
    REPETITIVE,
    ("json", '{"type": "array", "items": {"enum": ["yes", "yes, yes"]}, "minItems": 5, "maxItems": 9}'),
    ("choice", '["aaaaaaaaaaaaaaaaaaaaaaaa", "aaaaaaaaaaaaaaaaaaaaab"]'),
    ("grammar", 'root ::= "((" root "))" | "aaaaaaaa"'),
    None,
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    model = tiny_model.write(tmp_path_factory.mktemp("drafted") / "tiny")
    return load(model, speculative_model=model)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("num_blocks", [512, 9], ids=["room for all", "preempting"])
@pytest.mark.parametrize("method", list(SpeculativeMethod))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_answer_that_follows_a_grammar(runner, method, num_blocks, temperature):
    prompts = [[1, 2, 3 + index] for index in range(10)]
    each = [params(FORMS[index % 5], seed=index, temperature=temperature) for index in range(10)]
    expected = InProcessEngine(runner).generate(prompts, each)
    config = SpeculationConfig(method, 4)
    engine = InProcessEngine(runner, num_blocks=num_blocks, free_block_reserve=0.0, speculation=config)
    assert engine.generate(prompts, each) == expected
    assert all(
        engine.last[str(index)].finish_reason is FinishReason.STOP for index in range(10) if index % 5 < 3
    )
    assert (engine.scheduler.stats.preemptions > 0) == (num_blocks == 9)


def test_drafts_are_accepted_under_a_grammar(runner):
    config = SpeculationConfig(SpeculativeMethod.DRAFT_MODEL, 4)
    engine = InProcessEngine(runner, speculation=config)
    steps, run = 0, runner.run

    def counting(step):
        nonlocal steps
        steps += 1
        return run(step)

    engine.runner = type("Counting", (), {"run": staticmethod(counting), "grammars": runner.grammars})
    [tokens] = engine.generate([[1, 2, 3]], [params(REPETITIVE, seed=1)])
    assert steps < len(tokens) / 2
