"""How many tokens to draft: as many as bring the most tokens a second, by what was accepted and what steps
cost.

Called by ``speculation``. With an acceptance of ``a`` for each token, ``k`` drafts bring the expected

    E(k) = 1 + a + ... + a^k = (1 - a^(k + 1)) / (1 - a)

tokens a step (Leviathan et al. 2023, eq. 1), and the step takes ``1 + k c`` times as long as without, where
``c`` is what verifying (and making) a draft costs, as a share of a plain step. The best ``k`` is the one with
the greatest E(k) / (1 + k c); when that is 0, drafting does not pay. Pure arithmetic.
"""

from dataclasses import dataclass

_FORGET = 0.98  # what an older step still counts when the next one was measured: the last 50 or so
_PRIOR_SHARE = 0.1  # of a step's time that one more token takes, until it was measured
_PRIOR_WEIGHT = 1.0  # in squared tokens of variance
_PRIOR_PASS = 0.25  # a draft model's pass, as a share of a step, until it was measured


def expected_tokens(acceptance: float, count: int) -> float:
    """Tokens that a step with ``count`` drafts brings, the model's own token among them."""
    if acceptance >= 1.0:
        return count + 1.0
    return float((1 - acceptance ** (count + 1)) / (1 - acceptance))


def best_length(acceptance: float, longest: int, cost: float) -> int:
    """The number of drafts, 0 to ``longest``, that brings the most tokens in a time."""
    best, best_rate, gained = 0, 1.0, 1.0
    power = 1.0
    for count in range(1, longest + 1):
        power *= acceptance
        gained += power
        if (rate := gained / (1 + count * cost)) > best_rate:
            best, best_rate = count, rate
    return best


@dataclass(slots=True)
class Acceptance:
    """Accepted drafts among those that had their chance (up to the first rejected one), older ones fading."""

    keep: float
    accepted: float = 0.0
    tried: float = 0.0

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """What became of one proposal."""
        self.accepted = self.accepted * self.keep + num_accepted
        self.tried = self.tried * self.keep + min(num_drafts, num_accepted + 1)

    def doubt(self) -> None:
        """Time has passed: what was seen counts half."""
        self.accepted /= 2
        self.tried /= 2

    def rate(self, prior: float, weight: float) -> float:
        """The estimate, as if ``weight`` drafts had been seen at the prior's rate before."""
        return (self.accepted + prior * weight) / (self.tried + weight)


class StepCosts:
    """What steps take: seconds = base + slope * tokens, fitted to the latest steps without prompts by least
    squares, with a weak prior for the slope; and what one pass of the draft model takes.
    """

    def __init__(self, *, has_draft_model: bool) -> None:
        self._weight = self._tokens = self._seconds = self._square = self._product = 0.0
        self._pass_share = _PRIOR_PASS if has_draft_model else 0.0

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long, drafting aside."""
        self._weight = self._weight * _FORGET + 1
        self._tokens = self._tokens * _FORGET + num_tokens
        self._seconds = self._seconds * _FORGET + seconds
        self._square = self._square * _FORGET + num_tokens * num_tokens
        self._product = self._product * _FORGET + num_tokens * seconds

    def drafted(self, num_passes: int, seconds: float, num_rows: int) -> None:
        """So many passes of the draft model took so long, for so many rows."""
        base = self._plain(num_rows)[0]
        if base > 0:
            self._pass_share += 0.1 * (seconds / num_passes / base - self._pass_share)

    def of_a_draft(self, num_rows: int) -> float:
        """Time for one more draft of each row, as a share of the time of a step without drafts."""
        base, slope = self._plain(num_rows)
        verified = num_rows * slope / base if base > 0 else _PRIOR_SHARE
        return verified + self._pass_share

    def _plain(self, num_rows: int) -> tuple[float, float]:
        """(seconds of a step with one token for each row, seconds for one token more)."""
        if not self._weight:
            return 0.0, 0.0
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = max(0.0, self._square / self._weight - tokens * tokens)
        covariance = self._product / self._weight - tokens * seconds
        prior = _PRIOR_SHARE * seconds / tokens
        slope = (covariance + _PRIOR_WEIGHT * prior) / (variance + _PRIOR_WEIGHT)
        slope = min(max(slope, 0.0), seconds / tokens)
        return seconds + slope * (num_rows - tokens), slope
