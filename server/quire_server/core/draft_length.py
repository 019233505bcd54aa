"""How many tokens to draft: the number that brings the most tokens a second, given acceptance and step costs.

With an acceptance rate of ``a`` for each token, ``k`` drafts bring the expected

    E(k) = 1 + a + ... + a^k = (1 - a^(k + 1)) / (1 - a)

tokens a step (Leviathan et al. 2023, eq. 1), and the step takes ``1 + o + k c`` times as long as one without
drafts: ``c`` is the cost of verifying (and making) one draft as a share of a plain step, ``o`` the fixed cost
of a step with drafts. The best ``k`` maximises E(k) / (1 + o + k c). Drafting pays only where that is at
least 1.1, because the estimates have errors and the work around a step is not measured. Pure arithmetic.
"""

from dataclasses import dataclass
from typing import NamedTuple

from quire_server.core.ngram_proposer import NgramProposer

_MIN_SPEEDUP = 1.1
_DECAY = 0.98  # weight of a measurement after each newer one: about the last 50 count
_NEWEST_WEIGHT = 0.2  # of a plain step in the average of plain steps
_MAX_STEPS_WITHOUT_PLAIN = 64  # then one step without drafts measures the plain cost again
_ASSUMED_STEPS_WITHOUT_PLAIN = 56  # for a number of rows that had no plain step yet: it is measured soon
_PRIOR_SHARE = 0.1  # of a step's time, for one more token of each row, until it is measured
_PRIOR_WEIGHT = 4.0  # in squared drafts of a step
_PRIOR_STEPS = 0.5  # steps with drafts that had no fixed cost
_PRIOR_PASS = 0.25  # a forward pass of the draft model, as a share of a step, until it is measured


def expected_tokens(acceptance: float, count: int) -> float:
    """Tokens that a step with ``count`` drafts brings, including the one that the model samples itself."""
    if acceptance >= 1.0:
        return count + 1.0
    return float((1 - acceptance ** (count + 1)) / (1 - acceptance))


class DraftCost(NamedTuple):
    """Cost of the drafts of each row in a step, as shares of the time of a plain step."""

    once: float
    each: float


def best_length(acceptance: float, longest: int, cost: DraftCost) -> int:
    """The number of drafts, 1 to ``longest``, with the highest throughput; 0 where drafting does not pay."""
    best, best_rate, gained = 0, _MIN_SPEEDUP, 1.0
    power = 1.0
    for count in range(1, longest + 1):
        power *= acceptance
        gained += power
        if (rate := gained / (1 + cost.once + count * cost.each)) > best_rate:
            best, best_rate = count, rate
    return best


@dataclass(slots=True)
class AcceptanceRate:
    """Share of accepted drafts among those that were verified (up to the first rejected one of a proposal),
    with exponential decay.
    """

    decay: float
    accepted: float = 0.0
    tried: float = 0.0

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Take in the outcome of one proposal."""
        self.accepted = self.accepted * self.decay + num_accepted
        self.tried = self.tried * self.decay + min(num_drafts, num_accepted + 1)

    def halve_weight(self) -> None:
        """After a pause, earlier outcomes count half."""
        self.accepted /= 2
        self.tried /= 2

    def estimate(self, prior: float, weight: float) -> float:
        """The estimate, as if ``weight`` drafts had been seen at the prior's rate before."""
        return (self.accepted + prior * weight) / (self.tried + weight)


@dataclass(slots=True)
class DraftState:
    """Speculative decoding of one sequence: ``length`` tokens are drafted once it has ``resume_at``
    tokens.
    """

    proposer: NgramProposer
    acceptance: AcceptanceRate
    length: int = 0
    resume_at: int = 0
    pause: int = 0  # tokens of the latest pause; 0 = drafting pays


class StepCosts:
    """Measured cost of drafts.

    seconds = once + each * drafts is fitted by least squares to the time that the latest steps with drafts
    took beyond a plain step of as many rows. The draft model's forward pass is measured separately.
    """

    def __init__(self, *, has_draft_model: bool) -> None:
        self._plain_seconds: dict[int, float] = {}  # by number of rows: a step with one token for each row
        self._steps_since_plain: dict[int, int] = {}  # steps with drafts since then
        # Sums over the latest steps with drafts, with exponential decay.
        self._steps = self._drafting_rows = self._drafts = 0.0
        self._squares = self._extra_seconds = self._product = 0.0
        self._pass_share = _PRIOR_PASS if has_draft_model else 0.0

    def record_step(self, num_rows: int, num_drafting: int, num_tokens: int, seconds: float) -> None:
        """Take in the time of a step without prompts: its rows, how many of them drafted, and all tokens.
        Time spent in the draft model is not included.
        """
        plain = self._plain_seconds.get(num_rows)
        drafts = num_tokens - num_rows
        if not drafts:
            # Capped, so that one slow step (a hiccup of the machine) does not distort the average.
            change = 0.0 if plain is None else min(seconds, 2 * plain) - plain
            self._plain_seconds[num_rows] = seconds if plain is None else plain + _NEWEST_WEIGHT * change
            self._steps_since_plain[num_rows] = 0
            return
        steps_since_plain = self._steps_since_plain.get(num_rows, _ASSUMED_STEPS_WITHOUT_PLAIN)
        self._steps_since_plain[num_rows] = steps_since_plain + 1
        if plain is not None:
            extra = min(seconds, 2 * plain * num_tokens / num_rows) - plain
            self._steps = self._steps * _DECAY + 1
            self._drafting_rows = self._drafting_rows * _DECAY + num_drafting
            self._drafts = self._drafts * _DECAY + drafts
            self._squares = self._squares * _DECAY + drafts * drafts
            self._extra_seconds = self._extra_seconds * _DECAY + extra
            self._product = self._product * _DECAY + drafts * extra

    def needs_plain_step(self, num_rows: int) -> bool:
        """Whether the next step of so many rows should have no drafts, to measure the plain cost again."""
        return self._steps_since_plain.get(num_rows, 0) >= _MAX_STEPS_WITHOUT_PLAIN

    def record_draft_passes(self, num_passes: int, seconds: float, num_rows: int) -> None:
        """Take in the time of the draft model's forward passes for so many rows."""
        plain = self._nearest_plain_seconds(num_rows)
        if plain > 0:
            self._pass_share += 0.1 * (seconds / num_passes / plain - self._pass_share)

    def cost(self, num_rows: int) -> DraftCost:
        """The cost of one row's drafts in a step of so many rows, when as many others draft as lately."""
        plain = self._nearest_plain_seconds(num_rows)
        if plain <= 0:
            return DraftCost(0.0, _PRIOR_SHARE + self._pass_share)
        once, each = self._fitted(_PRIOR_SHARE * plain / num_rows)
        share_per_second = num_rows / plain
        drafting_rows = self._drafting_rows / self._steps if self._steps else 1.0
        return DraftCost(once * share_per_second / drafting_rows, each * share_per_second + self._pass_share)

    def _fitted(self, prior: float) -> tuple[float, float]:
        """Extra seconds of a step with drafts, and of each draft; neither is below 0."""
        steps, squares = self._steps + _PRIOR_STEPS, self._squares + _PRIOR_WEIGHT
        product = self._product + _PRIOR_WEIGHT * prior
        determinant = steps * squares - self._drafts * self._drafts
        each = (steps * product - self._drafts * self._extra_seconds) / determinant
        if each < 0:
            return max(0.0, self._extra_seconds / steps), 0.0
        once = (self._extra_seconds * squares - self._drafts * product) / determinant
        return (once, each) if once > 0 else (0.0, max(0.0, product / squares))

    def _nearest_plain_seconds(self, num_rows: int) -> float:
        """Seconds of a plain step with the nearest measured number of rows; 0 before the first one."""
        if not self._plain_seconds:
            return 0.0
        return self._plain_seconds[min(self._plain_seconds, key=lambda known: abs(known - num_rows))]
