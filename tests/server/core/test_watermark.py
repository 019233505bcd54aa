"""The watermark's statistic on random and on watermarked texts, with fixed seeds."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_server.core.watermark import Watermark, detect, read_key
from quire_server.errors import ConfigError

KEY = b"0123456789abcdef"


def random_text(seed: int, length: int, vocab: int = 500) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


def watermarked_text(
    watermark: Watermark, seed: int, length: int, chance: float, vocab: int = 500
) -> list[int]:
    """A text in which each token is green with at least this probability."""
    rng = random.Random(seed)
    tokens = [rng.randrange(vocab)]
    while len(tokens) < length:
        candidate = rng.randrange(vocab)
        if watermark.is_green(tokens[-1], candidate) or rng.random() >= chance:
            tokens.append(candidate)
    return tokens


@pytest.mark.parametrize("gamma", [0.25, 0.5, 0.75])
def test_about_gamma_of_the_vocabulary_is_green_and_it_changes_with_the_token_before(gamma: float) -> None:
    watermark = Watermark(KEY, gamma)
    lists = [[watermark.is_green(previous, token) for token in range(4000)] for previous in range(5)]
    for green in lists:
        assert sum(green) / 4000 == pytest.approx(gamma, abs=5 * math.sqrt(gamma * (1 - gamma) / 4000))
    same = sum(a == b for a, b in zip(lists[0], lists[1], strict=True)) / 4000
    assert same == pytest.approx(gamma**2 + (1 - gamma) ** 2, abs=0.04)


def test_random_texts_are_not_detected_and_their_scores_are_normally_distributed() -> None:
    watermark = Watermark(KEY)
    scores = [detect(random_text(seed, 200), watermark) for seed in range(300)]
    assert {one.verdict for one in scores} == {"not watermarked"}
    mean = sum(one.z_score for one in scores) / 300
    spread = math.sqrt(sum((one.z_score - mean) ** 2 for one in scores) / 300)
    assert abs(mean) < 0.3
    assert 0.8 < spread < 1.2
    assert 0.02 < sum(one.p_value < 0.05 for one in scores) / 300 < 0.09


@pytest.mark.parametrize("gamma", [0.25, 0.5])
def test_watermarked_texts_are_detected_with_their_key_and_with_no_other(gamma: float) -> None:
    watermark, other = Watermark(KEY, gamma), Watermark(KEY[::-1], gamma)
    for seed in range(20):
        tokens = watermarked_text(watermark, seed, 200, 0.8)
        assert detect(tokens, watermark).verdict == "watermarked"
        assert detect(tokens, watermark).p_value < 1e-5
        assert detect(tokens, other).verdict == "not watermarked"


def test_repeating_a_text_does_not_raise_the_score() -> None:
    watermark = Watermark(KEY)
    phrase = next(
        text for text in (random_text(seed, 12) for seed in range(99)) if detect(text, watermark).z_score > 1
    )
    assert detect(phrase * 50, watermark).num_tokens == len(phrase)
    assert detect(phrase * 50, watermark).verdict == "too short to tell"


@given(st.integers(0, 60), st.integers(0, 60), st.sampled_from([0.25, 0.5]))
@settings(max_examples=60, deadline=None)
def test_the_p_value_is_the_binomial_tail(length: int, seed: int, gamma: float) -> None:
    found = detect(random_text(seed, length), Watermark(KEY, gamma))
    n, k = found.num_tokens, found.num_green
    exact = sum(math.comb(n, i) * gamma**i * (1 - gamma) ** (n - i) for i in range(k, n + 1))
    assert found.p_value == pytest.approx(exact, rel=1e-9)


def test_a_text_without_pairs_is_too_short() -> None:
    for tokens in ([], [7]):
        found = detect(tokens, Watermark(KEY))
        assert (found.num_tokens, found.z_score, found.p_value) == (0, 0.0, 1.0)
        assert found.verdict == "too short to tell"


def test_a_key_is_read_from_a_file_and_never_shown(tmp_path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"a secret of 24 bytes....\n")
    key = read_key(path)
    path.write_bytes(b"a secret of 24 bytes....")
    assert read_key(path) == key
    assert "secret" not in repr(Watermark(key))
    assert key.hex() not in repr(Watermark(key))


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 5000, None])
def test_an_invalid_key_is_refused(tmp_path, content: bytes | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="watermark key"):
        read_key(path)
