"""Sampling: the right distribution, transformers' thresholds, and no dependence on the rest of the batch."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import NOTHING_ALLOWED, StartedRow, Step
from quire_server.core.watermark import Watermark
from quire_server.runner import sampler
from quire_server.runner.input_batch import InputBatch

VOCAB = 16
DRAWS = 20_000
CHI_SQUARE_15 = 50.5  # exceeded by chance once in 100,000 runs; seeds are fixed
WATERMARK = Watermark(b"a key of the tests", 0.5, 2.0)

draft_requests = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.0, 0.4, 1.0, 1.7]),
    top_k=st.sampled_from([0, 3, 40]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.integers(-5, 5),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((1, 5.0), (2, -5.0))]),
    allowed_token_ids=st.sampled_from([(), (), tuple(range(9))]),
    bad_words=st.sampled_from([(), ((3,), (1, 2))]),
    watermark=st.booleans(),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.sampled_from([(), (1, 5)]),
)


def step(started: Sequence[StartedRow]) -> Step:
    return Step(1, tuple(started), (), (), (), (), ())


def input_batch_of(wanted: Sequence[tuple[list[int], SamplingParams]]) -> InputBatch:
    input_batch = InputBatch(len(wanted), 64, 16)
    input_batch.apply(
        step(
            [
                StartedRow(row, str(row), tuple(context), 2, (0,), asked, asked.seed or 0)
                for row, (context, asked) in enumerate(wanted)
            ]
        )
    )
    return input_batch


def sampled_tokens(
    logits: torch.Tensor, input_batch: InputBatch, ids: Sequence[int], lengths: Sequence[int]
) -> list[int]:
    tokens, failures = sampler.sample(
        logits.clone(), input_batch, np.array(ids), np.array(lengths), (0,), WATERMARK
    )
    assert failures == {}
    return tokens.tolist()


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=12), draft_requests),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 2**20),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_a_token_depends_on_its_own_request_and_on_no_neighbour(
    wanted: list[tuple[list[int], SamplingParams]], seed: int, order: object
) -> None:
    logits = torch.randn(len(wanted), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    rows = input_batch_of(wanted)
    alone = [
        sampled_tokens(logits[row : row + 1], input_batch_of([one]), [0], [len(one[0])])[0]
        for row, one in enumerate(wanted)
    ]
    shuffled = list(range(len(wanted)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis' random.Random
    together = sampled_tokens(logits[shuffled], rows, shuffled, [len(wanted[row][0]) for row in shuffled])
    assert together == [alone[row] for row in shuffled]


@given(st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=12), draft_requests, st.integers(0, 2**20))
@settings(max_examples=100, deadline=None)
def test_several_positions_of_a_row_at_once_are_what_they_are_one_by_one(
    context: list[int], asked: SamplingParams, seed: int
) -> None:
    lengths = list(range(2, len(context) + 1))
    logits = torch.randn(len(lengths), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    rows = input_batch_of([(context, asked)])
    one_by_one = [
        sampled_tokens(logits[i : i + 1], rows, [0], [length])[0] for i, length in enumerate(lengths)
    ]
    assert sampled_tokens(logits, rows, [0] * len(lengths), lengths) == one_by_one


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.7, "top_k": 9},
        {"temperature": 1.5, "top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.95, "min_p": 0.3},
    ],
    ids=str,
)
def test_draws_have_the_distribution_that_transformers_gives(asked: dict[str, float]) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(8)) * 1.5
    scores = logits
    for name, warper in (
        ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if name in asked:
            scores = warper(asked[name])(torch.zeros(1, 1, dtype=torch.long), scores)
    expected = scores.softmax(-1)[0] * DRAWS

    rows = input_batch_of([([1, 1], SamplingParams(9, seed=3, **asked))])  # type: ignore[arg-type]  # mixed values
    lengths = np.arange(2, 2 + DRAWS)
    tokens, _ = sampler.sample(
        logits.expand(DRAWS, -1).clone(), rows, np.zeros(DRAWS, np.int64), lengths, (), None
    )

    counts = torch.from_numpy(np.bincount(tokens, minlength=VOCAB)).double()
    possible = expected > 0
    assert int(counts[~possible].sum()) == 0, "what was cut is never drawn"
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    assert chi_square < CHI_SQUARE_15


def test_a_request_that_excludes_every_token_fails_alone_and_says_why() -> None:
    bad_words = tuple((token,) for token in range(3))
    impossible = SamplingParams(9, temperature=0.0, allowed_token_ids=(0, 1, 2), bad_words=bad_words)
    rows = input_batch_of([([4, 5], SamplingParams(9, temperature=0.0)), ([4, 5], impossible)])
    logits = torch.zeros(2, VOCAB)
    logits[0, 7] = 1.0
    tokens, failures = sampler.sample(logits, rows, np.array([0, 1]), np.array([2, 2]), ())
    assert tokens[0] == 7
    assert list(failures) == [1]
    assert failures[1] == NOTHING_ALLOWED


def test_log_probabilities_are_counted_by_position() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.7, 0.1]]))
    found = sampler.logprobs(logits, np.array([1, 0, 2]), np.array([1, -1, 2]))
    assert sorted(found) == [0, 2]
    assert found[0].logprob == pytest.approx(math.log(0.25))
    assert [token for token, _ in found[2].top] == [1, 0]
