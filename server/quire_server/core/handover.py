"""From sequences to what the runner is told of them. Called by the scheduler; decides nothing."""

from quire_server.core.sequence import Sequence
from quire_server.core.step import Copies, StartedRow, Step

Chunk = tuple[Sequence, int]  # tokens of a sequence that a step computes


def step_of(
    step_id: int,
    singles: list[Sequence],
    chunks: list[Chunk],
    started: list[StartedRow],
    grown: list[tuple[int, int]],
    copies: Copies | None,
) -> Step:
    """The step that computes a token of each of ``singles``, then the chunks."""
    in_flight = singles + [sequence for sequence, _ in chunks]
    return Step(
        step_id=step_id,
        started=tuple(started),
        grown=tuple(grown),
        rows=tuple([sequence.row for sequence in in_flight]),
        starts=tuple([sequence.num_computed for sequence in in_flight]),
        num_tokens=(1,) * len(singles) + tuple(n for _, n in chunks),
        samples=(True,) * len(singles) + tuple(s.num_computed + n == len(s.tokens) for s, n in chunks),
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
