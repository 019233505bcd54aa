"""Speculative decoding: which rows try several tokens at once, how many, and what was learnt from the last
time.

Called by the scheduler, last of all: drafts get the budget and the blocks that nobody else wants, so that
they cost no request its turn or its place. A draft is checked by the model itself and counts only where it is
what the model would have said (ADR 0013), so nothing in here can change an answer, and the clock may have its
say in it.
"""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import NamedTuple

from quire_server.core.draft_length import Acceptance, StepCosts, best_length
from quire_server.core.drafting import Drafting
from quire_server.core.kv_manager import KVManager
from quire_server.core.limits import SpeculationConfig, SpeculativeMethod
from quire_server.core.policy import TOP_PRIORITY
from quire_server.core.prompt_lookup import PromptLookup
from quire_server.core.sequence import Sequence
from quire_server.core.speculation_stats import SpeculationStats
from quire_server.core.step import StepResult

_PRIOR = 0.7  # acceptance before anything was seen
_PRIOR_WEIGHT = 2.0
_OTHERS_WEIGHT = 8.0  # of all rows' beside a row's own: the luckiest ones look better than they are
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 128  # tokens without drafts after drafting did not pay
_NEVER = 1 << 62


class Draft(NamedTuple):
    """``num_tokens`` for the model to check; no tokens: the draft model is to find them."""

    sequence: Sequence
    num_tokens: int
    tokens: tuple[int, ...]


def held(drafts: Tokens[int], sampled: Tokens[int]) -> int:
    """How many drafts are what the model sampled in their place, up to the first that is not."""
    for index, draft in enumerate(drafts):
        if draft != sampled[index]:
            return index
    return len(drafts)


class Speculator:
    """One for each scheduler, which calls ``draft``, ``begin``, ``learn`` for each draft, and ``end``."""

    def __init__(self, config: SpeculationConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._has_model = config.method is SpeculativeMethod.DRAFT_MODEL
        self._costs = StepCosts(has_draft_model=self._has_model)
        self._everyone = Acceptance(keep=0.98)
        self._drafts = self._draft_tokens = self._pauses = 0
        self._accepted = [0] * config.num_tokens  # by place in the draft
        self._cost = self._costs.of_drafts(1)  # in the latest step without prompts
        self._num_rows = 0  # of the step under way; 0 = it computes prompts, and measures nothing
        self._num_drafting = 0  # of those
        self._began_at = 0.0

    def stats(self) -> SpeculationStats:
        """Counters of this moment."""
        return SpeculationStats(
            self._drafts, self._draft_tokens, sum(self._accepted), tuple(self._accepted), self._pauses
        )

    def draft(
        self, singles: list[Sequence], budget: int, kv: KVManager, grown: list[tuple[int, int]]
    ) -> list[Draft]:
        """Take out of ``singles`` those that try more than one token; ``grown`` gains the blocks for them."""
        self._began_at = self._clock()
        drafts: list[Draft] = []
        if self._costs.wants_plain(len(singles)):
            return drafts
        for sequence in singles:
            if budget <= 0:
                break
            drafting = sequence.drafting or self._begun(sequence)
            if len(sequence.tokens) < drafting.resume_at:
                continue
            count = min(budget, drafting.length, sequence.max_total - len(sequence.tokens) - 1)
            if count < 1:
                continue
            tokens = () if self._has_model else drafting.lookup.propose(sequence.tokens, count)
            if not (tokens or self._has_model):
                continue
            if (count := min(count, self._room(sequence, count, kv, grown))) < 1:
                continue
            drafts.append(Draft(sequence, count, tokens[:count]))
            budget -= count
        if drafts:
            drafted = {draft.sequence for draft in drafts}
            singles[:] = [sequence for sequence in singles if sequence not in drafted]
        return drafts

    def begin(self, num_rows: int, num_drafting: int, *, has_prompts: bool) -> None:
        """A step is about to run, in which so many of its rows draft."""
        self._num_drafting = num_drafting
        self._num_rows = 0 if has_prompts else num_rows

    def end(self, result: StepResult) -> None:
        """It ran and is taken in: a step without prompts samples at every token, and shows what one costs,
        from the search for drafts to the last answer.
        """
        if not self._num_rows:
            return
        seconds = self._clock() - self._began_at - result.draft_seconds
        num_tokens = len(result.token_ids)
        self._costs.measured(self._num_rows, self._num_drafting, num_tokens, max(0.0, seconds))
        if result.draft_seconds and result.drafts:
            num_passes = max(len(tokens) for _, tokens in result.drafts)
            self._costs.drafted(max(1, num_passes), result.draft_seconds, self._num_rows)
        self._cost = self._costs.of_drafts(self._num_rows)

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """So many drafts of a sequence were right; its tokens are up to date."""
        drafting = sequence.drafting
        assert drafting is not None
        self._drafts += 1
        self._draft_tokens += num_drafts
        for place in range(num_accepted):
            self._accepted[place] += 1
        drafting.acceptance.learn(num_drafts, num_accepted)
        self._everyone.learn(num_drafts, num_accepted)
        drafting.length = self._best_length(drafting)
        if drafting.length:
            drafting.pause = 0
            return
        drafting.length = 1
        drafting.pause = min(2 * drafting.pause or _FIRST_PAUSE, _LONGEST_PAUSE)
        drafting.resume_at = len(sequence.tokens) + drafting.pause
        drafting.acceptance.doubt()
        self._pauses += 1

    def _best_length(self, drafting: Drafting) -> int:
        """By its own drafts so far, and by everybody's where they are few."""
        prior = self._everyone.rate(_PRIOR, _PRIOR_WEIGHT)
        rate = drafting.acceptance.rate(prior, _OTHERS_WEIGHT)
        return best_length(rate, self._config.num_tokens, self._cost)

    def _begun(self, sequence: Sequence) -> Drafting:
        """The health canary proves the model as it is: it never drafts, so its arithmetic never varies."""
        drafting = Drafting(
            lookup=PromptLookup(self._config.lookup_min, self._config.lookup_max),
            acceptance=Acceptance(keep=0.9),
        )
        drafting.length = max(1, self._best_length(drafting))  # where others draft in vain, it tries once
        if sequence.request.priority == TOP_PRIORITY:
            drafting.resume_at = _NEVER
        sequence.drafting = drafting
        return drafting

    def _room(self, sequence: Sequence, count: int, kv: KVManager, grown: list[tuple[int, int]]) -> int:
        """How many drafts its blocks hold, with some more of them where there is plenty."""
        length = len(sequence.tokens)
        while sequence.capacity < length + count and kv.has_spare:
            block_id = kv.grow(sequence)
            if block_id is None:
                break
            grown.append((sequence.row, block_id))
        return sequence.capacity - length
