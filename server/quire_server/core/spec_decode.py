"""Speculative decoding: which rows verify drafts in a step, how many tokens each, and what acceptance
teaches.

Scheduled last: drafts get only the token budget and the KV blocks that nothing else needs, so that they delay
no request. A draft counts only where it equals what the model samples in its place (ADR 0013), so nothing in
here can change an answer; that is why measured times may decide.
"""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import NamedTuple

from quire_server.core.config import SpeculationConfig, SpeculativeMethod
from quire_server.core.draft_length import AcceptanceRate, DraftState, StepCosts, best_length
from quire_server.core.kv_cache_manager import KVCacheManager
from quire_server.core.ngram_proposer import NgramProposer
from quire_server.core.policy import TOP_PRIORITY
from quire_server.core.sequence import Sequence
from quire_server.core.stats import SpeculationStats
from quire_server.core.step import StepResult

_PRIOR = 0.7  # acceptance rate before the first measurement
_PRIOR_WEIGHT = 2.0
_SHARED_WEIGHT = 8.0  # of all rows' rate beside a row's own: the rates of the luckiest rows are overestimated
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 128  # tokens without drafts after drafting did not pay
_NEVER = 1 << 62


class DraftPlan(NamedTuple):
    """``num_tokens`` drafts for the model to verify. Empty ``tokens``: the draft model proposes them."""

    sequence: Sequence
    num_tokens: int
    tokens: tuple[int, ...]


def num_accepted(drafts: Tokens[int], sampled: Tokens[int]) -> int:
    """How many drafts equal the tokens that the model sampled in their place, up to the first difference."""
    for index, draft in enumerate(drafts):
        if draft != sampled[index]:
            return index
    return len(drafts)


class Speculator:
    """One for each scheduler, which calls ``draft``, ``begin_step``, ``learn`` for each draft, and
    ``end_step``.
    """

    def __init__(self, config: SpeculationConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._has_model = config.method is SpeculativeMethod.DRAFT_MODEL
        self._costs = StepCosts(has_draft_model=self._has_model)
        self._shared_rate = AcceptanceRate(decay=0.98)
        self._drafts = self._draft_tokens = self._pauses = 0
        self._accepted = [0] * config.num_tokens  # by position in the draft
        self._cost = self._costs.cost(1)  # as of the latest step without prompts
        self._num_rows = 0  # of the step in flight; 0 = it computes prompts, so its time is not used
        self._num_drafting = 0  # of those rows
        self._began_at = 0.0

    def stats(self) -> SpeculationStats:
        """Counters since the start."""
        return SpeculationStats(
            self._drafts, self._draft_tokens, sum(self._accepted), tuple(self._accepted), self._pauses
        )

    def draft(
        self, decodes: list[Sequence], budget: int, kv: KVCacheManager, new_blocks: list[tuple[int, int]]
    ) -> list[DraftPlan]:
        """Move the sequences that get drafts from ``decodes`` to the result; their blocks are added to
        ``new_blocks``.
        """
        self._began_at = self._clock()
        drafts: list[DraftPlan] = []
        if self._costs.needs_plain_step(len(decodes)):
            return drafts
        for sequence in decodes:
            if budget <= 0:
                break
            state = sequence.draft_state or self._new_state(sequence)
            if len(sequence.tokens) < state.resume_at:
                continue
            count = min(budget, state.length, sequence.max_total - len(sequence.tokens) - 1)
            if count < 1:
                continue
            tokens = () if self._has_model else state.proposer.propose(sequence.tokens, count)
            if not (tokens or self._has_model):
                continue
            if (count := min(count, self._room(sequence, count, kv, new_blocks))) < 1:
                continue
            drafts.append(DraftPlan(sequence, count, tokens[:count]))
            budget -= count
        if drafts:
            drafted = {draft.sequence for draft in drafts}
            decodes[:] = [sequence for sequence in decodes if sequence not in drafted]
        return drafts

    def begin_step(self, num_rows: int, num_drafting: int, *, has_prompts: bool) -> None:
        """Note what the step that was just planned computes."""
        self._num_drafting = num_drafting
        self._num_rows = 0 if has_prompts else num_rows

    def end_step(self, result: StepResult) -> None:
        """Measure a committed step without prompts, from the search for drafts to its commit. Such a step
        samples at every token, so its tokens are those of the result.
        """
        if not self._num_rows:
            return
        seconds = self._clock() - self._began_at - result.draft_seconds
        num_tokens = len(result.token_ids)
        self._costs.record_step(self._num_rows, self._num_drafting, num_tokens, max(0.0, seconds))
        if result.draft_seconds and result.drafts:
            num_passes = max(len(tokens) for _, tokens in result.drafts)
            self._costs.record_draft_passes(max(1, num_passes), result.draft_seconds, self._num_rows)
        self._cost = self._costs.cost(self._num_rows)

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Take in how many drafts of a sequence were accepted, after its tokens were appended."""
        state = sequence.draft_state
        assert state is not None
        self._drafts += 1
        self._draft_tokens += num_drafts
        for position in range(num_accepted):
            self._accepted[position] += 1
        state.acceptance.learn(num_drafts, num_accepted)
        self._shared_rate.learn(num_drafts, num_accepted)
        state.length = self._best_length(state)
        if state.length:
            state.pause = 0
            return
        state.length = 1
        state.pause = min(2 * state.pause or _FIRST_PAUSE, _LONGEST_PAUSE)
        state.resume_at = len(sequence.tokens) + state.pause
        state.acceptance.halve_weight()
        self._pauses += 1

    def _best_length(self, state: DraftState) -> int:
        """By the sequence's own acceptance rate; while it has few drafts, by the rate of all sequences."""
        prior = self._shared_rate.estimate(_PRIOR, _PRIOR_WEIGHT)
        rate = state.acceptance.estimate(prior, _SHARED_WEIGHT)
        return best_length(rate, self._config.num_tokens, self._cost)

    def _new_state(self, sequence: Sequence) -> DraftState:
        """A sequence drafts at least once, even where drafting does not pay for others. The health canary
        never does: its arithmetic must be the same in every run.
        """
        state = DraftState(
            proposer=NgramProposer(self._config.lookup_min, self._config.lookup_max),
            acceptance=AcceptanceRate(decay=0.9),
        )
        state.length = max(1, self._best_length(state))
        if sequence.request.priority == TOP_PRIORITY:
            state.resume_at = _NEVER
        sequence.draft_state = state
        return state

    def _room(
        self, sequence: Sequence, count: int, kv: KVCacheManager, new_blocks: list[tuple[int, int]]
    ) -> int:
        """How many drafts its blocks hold, after appending blocks while more than the reserve is free."""
        length = len(sequence.tokens)
        while sequence.capacity < length + count and kv.has_spare:
            block_id = kv.append_block(sequence)
            if block_id is None:
                break
            new_blocks.append((sequence.row, block_id))
        return sequence.capacity - length
