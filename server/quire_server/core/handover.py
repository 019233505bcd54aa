"""From sequences to what the runner is told of them. Called by the scheduler; decides nothing."""

from dataclasses import dataclass, field

from quire_server.core.sequence import Sequence
from quire_server.core.speculation import Draft
from quire_server.core.step import Copies, StartedRow, Step

Chunk = tuple[Sequence, int]  # tokens of a sequence that a step computes


@dataclass(slots=True)
class Turns:
    """Who has a turn in a step, and what the runner has to hear first."""

    singles: list[Sequence] = field(default_factory=list)
    newcomers: list[Sequence] = field(default_factory=list)  # that start, and lack one token
    drafts: list[Draft] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    started: list[StartedRow] = field(default_factory=list)
    grown: list[tuple[int, int]] = field(default_factory=list)  # (row, block)

    def in_order(self) -> list[Sequence]:
        """Every sequence, in the step's order."""
        drafted = [draft.sequence for draft in self.drafts]
        return self.singles + drafted + [sequence for sequence, _ in self.chunks]


def step_of(step_id: int, turns: Turns, in_order: list[Sequence], copies: Copies | None) -> Step:
    """The step that computes a token of each single, then the drafted ones, then the chunks."""
    ones, chunks = (1,) * len(turns.singles), turns.chunks
    checked = tuple([1 + draft.num_tokens for draft in turns.drafts])
    return Step(
        step_id=step_id,
        started=tuple(turns.started),
        grown=tuple(turns.grown),
        rows=tuple([sequence.row for sequence in in_order]),
        starts=tuple([sequence.num_computed for sequence in in_order]),
        num_tokens=ones + checked + tuple([n for _, n in chunks]),
        samples=ones + checked + tuple([int(s.num_computed + n == len(s.tokens)) for s, n in chunks]),
        drafts=tuple([(draft.sequence.row, draft.tokens) for draft in turns.drafts if draft.tokens]),
        wishes=tuple([(draft.sequence.row, draft.num_tokens) for draft in turns.drafts if not draft.tokens]),
        copies=copies,
    )


def started_row(sequence: Sequence) -> StartedRow:
    """What the runner has to know when the sequence takes its row."""
    return StartedRow(
        row=sequence.row,
        request_id=sequence.request.request_id,
        token_ids=tuple(sequence.tokens),
        num_prompt_tokens=len(sequence.request.prompt_token_ids),
        block_ids=tuple(sequence.block_ids),
        sampling=sequence.request.sampling,
        seed=sequence.seed,
    )
