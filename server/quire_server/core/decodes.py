"""What a step costs beside the model: one more token for each of many sequences, and little to say of most.

Called by the scheduler's commit. Nothing in here but what every row needs.
"""

from collections.abc import Sequence as Tokens

from quire_server.core.request import FinishReason
from quire_server.core.sequence import Sequence
from quire_server.core.step import StepResult, TokenEvent


def count(decodes: list[Sequence], token_ids: Tokens[int]) -> list[Sequence]:
    """Give each sequence its token; returns those with which there is more to do."""
    watched: list[Sequence] = []
    for sequence, token in zip(decodes, token_ids, strict=True):
        sequence.tokens.append(token)
        sequence.num_computed = num_computed = sequence.num_computed + 1
        if num_computed >= sequence.watch_from or token in sequence.stop_ids:
            watched.append(sequence)
    return watched


def columns(
    decodes: list[Sequence], token_ids: Tokens[int], told: set[Sequence]
) -> tuple[list[str], list[int]]:
    """Request ids and tokens of those that have no event of their own."""
    if not told:
        return [sequence.request.request_id for sequence in decodes], list(token_ids)
    plain = [sequence for sequence in decodes if sequence not in told]
    return [s.request.request_id for s in plain], [s.tokens[-1] for s in plain]


def report(sequence: Sequence, result: StepResult) -> list[TokenEvent]:
    """What is new of what the step says of prompt tokens; after a preemption it says some again."""
    told = result.prompt_logprobs.get(sequence.row, ())[sequence.num_reported - sequence.num_computed :]
    sequence.num_reported += len(told)
    return [TokenEvent(sequence.request.request_id, (), prompt_logprobs=told)] if told else []


def event(sequence: Sequence, num_tokens: int, reason: FinishReason | None, result: StepResult) -> TokenEvent:
    """All there is to say of a sequence's newest tokens."""
    logprobs = result.logprobs.get(sequence.row, ())[:num_tokens] if result.logprobs else ()
    return TokenEvent(
        sequence.request.request_id,
        tuple(sequence.tokens[-num_tokens:]),
        logprobs or None,
        reason,
        None,
        sequence.num_cached_tokens or 0,
        timing=sequence.stamp(is_last=reason is not None),
    )
