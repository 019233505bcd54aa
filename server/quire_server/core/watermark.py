"""Text watermarks: the green list of Kirchenbauer et al. 2023 (arXiv:2301.10226), and its statistic.

The sampler adds ``delta`` to the logits of green tokens; the detector counts the green tokens of a text. Both
use this module, so that they agree. Whether a token is green follows from (key, previous token, token): a
keyed BLAKE2b of the previous token seeds SplitMix64 (Steele et al. 2014), whose number at the index of the
token decides. So one token costs a few integer operations, a whole vocabulary is one vector operation (see
``runner.logits_processors``), and there is no state. Knows no tensors and no text.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from quire_server.errors import ConfigError

GOLDEN = 0x9E3779B97F4A7C15
MIXERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_MIN_KEY_BYTES = 16
_MAX_KEY_BYTES = 4096
Z_LIMIT = 4.0  # by chance once in 30,000 texts


class WatermarkMode(StrEnum):
    """Values of ``--watermark``: which answers carry one."""

    OFF = "off"
    ON_REQUEST = "on-request"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Watermark:
    """``gamma``: share of the vocabulary that is green; ``delta``: what is added to a green token's logit."""

    key: bytes = field(repr=False)
    gamma: float = 0.5
    delta: float = 2.0

    def seed(self, previous: int) -> int:
        """The 64-bit seed of the green list that follows a token."""
        digest = hashlib.blake2b(previous.to_bytes(8, "little"), key=self.key, digest_size=8)
        return int.from_bytes(digest.digest(), "little")

    @property
    def limit(self) -> int:
        """A token is green when its 64-bit number is less than this."""
        return int(self.gamma * 2.0**53) << 11

    def is_green(self, previous: int, token: int) -> bool:
        """Whether this token is green after that one."""
        number = (self.seed(previous) + (token + 1) * GOLDEN) & _MASK
        number = ((number ^ (number >> 30)) * MIXERS[0]) & _MASK
        number = ((number ^ (number >> 27)) * MIXERS[1]) & _MASK
        return (number ^ (number >> 31)) < self.limit


def read_key(path: Path) -> bytes:
    """The key in a file, without leading and trailing white space. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            secret = file.read(_MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"The watermark key {path} cannot be read ({error.strerror}).") from None
    if not _MIN_KEY_BYTES <= len(secret) <= _MAX_KEY_BYTES:
        raise ConfigError(
            f"The watermark key {path} must have {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes; make one with "
            "openssl rand -hex 32."
        )
    return hashlib.sha256(secret).digest()


@dataclass(frozen=True, slots=True)
class Detection:
    """The statistic of a text."""

    num_tokens: int  # that were counted
    num_green: int
    green_fraction: float
    z_score: float  # standard deviations above the expectation without a watermark
    p_value: float  # probability of at least so many green tokens by chance
    verdict: str


def detect(tokens: Sequence[int], watermark: Watermark) -> Detection:
    """Count each pair of neighbouring tokens once: a repeated pair is not independent evidence."""
    pairs = set(zip(tokens, tokens[1:], strict=False))
    count, gamma = len(pairs), watermark.gamma
    green = sum(watermark.is_green(previous, token) for previous, token in pairs)
    return Detection(
        num_tokens=count,
        num_green=green,
        green_fraction=green / count if count else 0.0,
        z_score=_z_score(green, count, gamma),
        p_value=_binomial_tail(green, count, gamma),
        verdict=_verdict(green, count, gamma),
    )


def _z_score(green: int, count: int, gamma: float) -> float:
    return (green - gamma * count) / math.sqrt(count * gamma * (1 - gamma)) if count else 0.0


def _verdict(green: int, count: int, gamma: float) -> str:
    if _z_score(count, count, gamma) < Z_LIMIT:
        return "too short to tell"  # not even if every token were green
    return "watermarked" if _z_score(green, count, gamma) >= Z_LIMIT else "not watermarked"


def _binomial_tail(successes: int, trials: int, probability: float) -> float:
    """P(at least so many successes), summed from its largest term down."""
    if successes <= 0:
        return 1.0
    log_odds = math.log(probability) - math.log1p(-probability)
    log_term = (
        math.lgamma(trials + 1)
        - math.lgamma(successes + 1)
        - math.lgamma(trials - successes + 1)
        + successes * math.log(probability)
        + (trials - successes) * math.log1p(-probability)
    )
    terms = []
    for k in range(successes, trials + 1):
        terms.append(math.exp(log_term))
        log_term += math.log((trials - k) or 1) - math.log(k + 1) + log_odds
    return min(1.0, math.fsum(terms))
