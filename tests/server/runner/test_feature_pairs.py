"""Combinations of request features and engine modes: the answer is the one that the request gets alone."""

import pytest

from quire_server.core.config import PreemptionMode, SpeculationConfig, SpeculativeMethod
from tests.server import tiny_model
from tests.server.runner.in_process import InProcessEngine, load
from tests.server.runner.ranks_in_process import Ranks
from tests.server.runner.test_structured_outputs import params
from tests.server.runner.test_structured_outputs_with_drafts import FORMS

ASKED = {
    "presence_penalty": 0.4,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": ((97, 3.0), (98, -3.0)),
    "bad_words": ((5,), (7, 8)),
}
PROMPTS = [[1, 2, 3 + index % 3] * 7 for index in range(10)]


def sampling(index, **more):
    return params(FORMS[index % 5], seed=index, temperature=(0.0, 1.0)[index % 2], prompt_logprobs=1, **more)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("features") / "tiny")


@pytest.fixture(scope="module")
def runner(model):
    return load(model, speculative_model=model, kv_offload_host_bytes=2 << 20)


@pytest.fixture(scope="module")
def runners(model, runner):
    """By the number of ranks."""
    ranks = Ranks(model, 2, speculative_model=model, kv_offload_host_bytes=2 << 20)
    yield {1: runner, 2: ranks.runner}
    ranks.close()


@pytest.mark.one_in(9)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", list(PreemptionMode))
@pytest.mark.parametrize("method", [SpeculativeMethod.NGRAM, SpeculativeMethod.DRAFT_MODEL])
def test_grammars_penalties_and_scored_prompts_survive_drafts_and_preemption(
    runner, runners, method, mode, ranks
):
    each = [sampling(index, **ASKED) for index in range(10)]
    alone, scores = [], []
    for prompt, one in zip(PROMPTS, each, strict=True):
        engine = InProcessEngine(runner)
        alone += engine.generate([prompt], [one])
        scores += [engine.prompt_logprobs["0"]]
    crowd = InProcessEngine(
        runners[ranks],
        num_blocks=12,
        free_block_reserve=0.0,
        num_host_slots=60,
        preemption_mode=mode,
        speculation=SpeculationConfig(method, 4, lookup_min=1),
    )
    assert crowd.generate(PROMPTS, each) == alone
    for index, expected in enumerate(scores):
        found = crowd.prompt_logprobs[str(index)]
        assert [one.token_id for one in found] == [one.token_id for one in expected]
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    stats = crowd.scheduler.stats
    assert stats.preemptions > 0 and stats.speculation.accepted_tokens > 0
    assert (crowd.scheduler.kv.stats().swaps > 0) == (mode is PreemptionMode.SWAP)
    plain = InProcessEngine(runner).generate(PROMPTS, [sampling(index) for index in range(10)])
    assert plain != alone, "nothing was asked for that changes an answer"
