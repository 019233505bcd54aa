"""How many tokens to draft: as many as bring the most tokens a second, by what was accepted and what steps
cost.

Called by ``speculation``. With an acceptance of ``a`` for each token, ``k`` drafts bring the expected

    E(k) = 1 + a + ... + a^k = (1 - a^(k + 1)) / (1 - a)

tokens a step (Leviathan et al. 2023, eq. 1), and the step takes ``1 + o + k c`` times as long as without,
where ``c`` is what verifying (and making) a draft costs, as a share of a plain step, and ``o`` what a step
with drafts costs at all. The best ``k`` is the one with the greatest E(k) / (1 + o + k c). When none promises
a tenth more than 1, drafting does not pay: estimates err, and the work around a step is not measured. Pure
arithmetic.
"""

from dataclasses import dataclass
from typing import NamedTuple

_WORTH = 1.1  # tokens in the time of one
_FORGET = 0.98  # what an older step still counts when the next one was measured: the last 50 or so
_NEWS = 0.2  # what the latest plain step counts
_LONGEST_WITHOUT_PLAIN = 64  # steps with drafts
_LONGEST_UNKNOWN = 56  # so many of them count as done where no plain step was seen: it comes soon
_PRIOR_SHARE = 0.1  # of a step's time that one more token for each row takes, until it was measured
_PRIOR_WEIGHT = 4.0  # in squared drafts of a step
_PRIOR_STEPS = 0.5  # with drafts, that cost nothing beyond their drafts
_PRIOR_PASS = 0.25  # a draft model's pass, as a share of a step, until it was measured


def expected_tokens(acceptance: float, count: int) -> float:
    """Tokens that a step with ``count`` drafts brings, the model's own token among them."""
    if acceptance >= 1.0:
        return count + 1.0
    return float((1 - acceptance ** (count + 1)) / (1 - acceptance))


class Cost(NamedTuple):
    """Of drafting for each row of a step, as shares of the time of a step without."""

    once: float
    each: float


def best_length(acceptance: float, longest: int, cost: Cost) -> int:
    """The number of drafts, 1 to ``longest``, that brings the most tokens in a time; 0 if that is little."""
    best, best_rate, gained = 0, _WORTH, 1.0
    power = 1.0
    for count in range(1, longest + 1):
        power *= acceptance
        gained += power
        if (rate := gained / (1 + cost.once + count * cost.each)) > best_rate:
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
    """What drafts cost: seconds = once + each * drafts, fitted by least squares to what the latest steps with
    drafts took beyond a plain step of as many rows; and what one pass of the draft model takes.
    """

    def __init__(self, *, has_draft_model: bool) -> None:
        self._plain: dict[int, float] = {}  # seconds of a step with one token for each row, by rows
        self._since_plain: dict[int, int] = {}  # steps with drafts after it
        # Sums over the latest steps with drafts, older ones fading.
        self._steps = self._drafting = self._drafts = self._squares = self._extra = self._product = 0.0
        self._pass_share = _PRIOR_PASS if has_draft_model else 0.0

    def measured(self, num_rows: int, num_drafting: int, num_tokens: int, seconds: float) -> None:
        """A step of so many rows, some of which drafted, and tokens took so long, drafting aside."""
        plain = self._plain.get(num_rows)
        drafts = num_tokens - num_rows
        if not drafts:
            news = 0.0 if plain is None else min(seconds, 2 * plain) - plain  # a hiccup is no news
            self._plain[num_rows] = seconds if plain is None else plain + _NEWS * news
            self._since_plain[num_rows] = 0
            return
        self._since_plain[num_rows] = self._since_plain.get(num_rows, _LONGEST_UNKNOWN) + 1
        if plain is not None:
            extra = min(seconds, 2 * plain * num_tokens / num_rows) - plain
            self._steps = self._steps * _FORGET + 1
            self._drafting = self._drafting * _FORGET + num_drafting
            self._drafts = self._drafts * _FORGET + drafts
            self._squares = self._squares * _FORGET + drafts * drafts
            self._extra = self._extra * _FORGET + extra
            self._product = self._product * _FORGET + drafts * extra

    def wants_plain(self, num_rows: int) -> bool:
        """Whether a step of so many rows is to do without drafts, to show again what that takes."""
        return self._since_plain.get(num_rows, 0) >= _LONGEST_WITHOUT_PLAIN

    def drafted(self, num_passes: int, seconds: float, num_rows: int) -> None:
        """So many passes of the draft model took so long, for so many rows."""
        plain = self._of_plain(num_rows)
        if plain > 0:
            self._pass_share += 0.1 * (seconds / num_passes / plain - self._pass_share)

    def of_drafts(self, num_rows: int) -> Cost:
        """What a row's drafts cost in a step of so many, if as many others draft beside it as of late."""
        plain = self._of_plain(num_rows)
        if plain <= 0:
            return Cost(0.0, _PRIOR_SHARE + self._pass_share)
        once, each = self._fitted(_PRIOR_SHARE * plain / num_rows)
        share = num_rows / plain  # of a step, for a second of each row
        together = self._drafting / self._steps if self._steps else 1.0
        return Cost(once * share / together, each * share + self._pass_share)

    def _fitted(self, prior: float) -> tuple[float, float]:
        """Seconds more that a step with drafts takes, and each of its drafts; neither is below 0."""
        steps, squares = self._steps + _PRIOR_STEPS, self._squares + _PRIOR_WEIGHT
        product = self._product + _PRIOR_WEIGHT * prior
        determinant = steps * squares - self._drafts * self._drafts
        each = (steps * product - self._drafts * self._extra) / determinant
        if each < 0:
            return max(0.0, self._extra / steps), 0.0
        once = (self._extra * squares - self._drafts * product) / determinant
        return (once, each) if once > 0 else (0.0, max(0.0, product / squares))

    def _of_plain(self, num_rows: int) -> float:
        """Seconds of a plain step of so many rows, or of the nearest number that was seen; 0 before any."""
        if not self._plain:
            return 0.0
        return self._plain[min(self._plain, key=lambda known: abs(known - num_rows))]
