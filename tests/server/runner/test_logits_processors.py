"""Penalties, banned tokens and thresholds equal transformers' processors, at any position of any row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from quire_server.core.sampling_params import SamplingParams, ThinkingBudget
from quire_server.core.watermark import Watermark
from quire_server.runner import logits_processors
from quire_server.runner.logits_processors import green_list

VOCAB = 23
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
seeds = st.integers(0, 2**31)


def logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(seed: int, context: list[int], num_prompt: int, **asked: object) -> torch.Tensor:
    row = logits(seed)
    sampling = SamplingParams(1, **asked)  # type: ignore[arg-type]  # mixed values
    watermark = Watermark(b"k" * 32, 0.5, 2.0)
    logits_processors.adjust(row, np.array(context, np.int64), num_prompt, sampling, watermark)
    return row


@given(seeds, tokens, st.floats(0.1, 3), st.data())
@settings(max_examples=100, deadline=None)
def test_repetition_is_transformers_own_over_prompt_and_answer(
    seed: int, context: list[int], penalty: float, data: st.DataObject
) -> None:
    oracle = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([context]), logits(seed)[None])[0]
    num_prompt = data.draw(st.integers(1, len(context)))
    torch.testing.assert_close(adjusted(seed, context, num_prompt, repetition_penalty=penalty), oracle)


@given(seeds, tokens, st.floats(-2, 2), st.floats(-2, 2), st.data())
@settings(max_examples=100, deadline=None)
def test_presence_and_frequency_count_the_answer_alone(
    seed: int, context: list[int], presence: float, frequency: float, data: st.DataObject
) -> None:
    num_prompt = data.draw(st.integers(1, len(context)))
    answer = context[num_prompt:]
    expected = logits(seed)
    for token in range(VOCAB):
        expected[token] -= frequency * answer.count(token) + presence * (token in answer)
    found = adjusted(seed, context, num_prompt, presence_penalty=presence, frequency_penalty=frequency)
    torch.testing.assert_close(found, expected)


@given(
    seeds,
    st.lists(st.integers(0, 2), max_size=8),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_bad_words_are_kept_from_being_completed_as_transformers_does(
    seed: int, answer: list[int], words: list[tuple[int, ...]]
) -> None:
    prompt = [VOCAB - 1]  # in no word
    oracle = NoBadWordsLogitsProcessor(bad_words_ids=[list(word) for word in words])
    expected = oracle(torch.tensor([prompt + answer]), logits(seed)[None])[0]
    torch.testing.assert_close(adjusted(seed, prompt + answer, 1, bad_words=tuple(words)), expected)


def test_a_bad_word_that_the_prompt_began_may_be_completed() -> None:
    assert torch.equal(adjusted(1, [5, 6], 2, bad_words=((5, 6, 7),)), logits(1))
    assert adjusted(1, [5, 6], 1, bad_words=((6, 7),))[7] == float("-inf")


def test_bias_is_added_and_only_what_is_allowed_is_left() -> None:
    bias = ((3, 100.0), (4, -100.0))
    found = adjusted(2, [1], 1, logit_bias=bias, allowed_token_ids=(3, 5)) - logits(2)
    assert found[3].item() == pytest.approx(100.0, abs=1e-4)
    assert [token for token in range(VOCAB) if found[token] > float("-inf")] == [3, 5]


@given(st.binary(min_size=16, max_size=64), st.integers(0, 2**40), st.floats(0.01, 0.99))
@settings(max_examples=50, deadline=None)
def test_the_samplers_green_list_is_the_detectors(key: bytes, previous: int, gamma: float) -> None:
    watermark = Watermark(key, gamma)
    expected = [watermark.is_green(previous, token) for token in range(300)]
    assert green_list(watermark, previous, 300).tolist() == expected


def test_green_tokens_gain_delta_and_others_nothing() -> None:
    watermark = Watermark(b"k" * 32, 0.5, 2.0)
    gained = adjusted(3, [7, 9], 1, watermark=True) - logits(3)
    torch.testing.assert_close(gained, torch.from_numpy(green_list(watermark, 9, VOCAB)).float() * 2)


BEGIN, END = 20, 21


@pytest.mark.parametrize(
    ("answer", "begin", "is_forced"),
    [
        ([], None, False),
        ([1, 2], None, False),
        ([1, 2, 3], None, True),
        ([1, 2, 3, 4, 5], None, True),  # drafts were in flight when it was spent
        ([1, END, 3, 4, 5], None, False),
        ([1, 2, 3, END, 5], None, False),
        ([BEGIN, 1, 2], BEGIN, False),
        ([BEGIN, 1, 2, 3], BEGIN, True),
        ([9, BEGIN, 1, 2, 3], BEGIN, True),
        ([9, 9, 9, 9, BEGIN, 1, 2, 3], BEGIN, False),  # no thought but text about one
        ([1, 2, 3, 4], BEGIN, False),
    ],
)
def test_a_thought_of_three_tokens_has_to_end(answer: list[int], begin: int | None, is_forced: bool) -> None:
    plain = logits(1)
    found = adjusted(1, [7, *answer], 1, thinking=ThinkingBudget(3, END, begin))
    if is_forced:
        assert torch.isfinite(found).nonzero().flatten().tolist() == [END]
    else:
        torch.testing.assert_close(found, plain)


def test_an_end_that_may_not_come_is_not_forced() -> None:
    found = adjusted(1, [7, 1, 1], 1, thinking=ThinkingBudget(1, END), bad_words=((END,),))
    assert found[END] == float("-inf") and torch.isfinite(found).sum() == VOCAB - 1
