"""When an answer ends, as far as token ids tell. Called by the scheduler after each sampled token."""

from collections.abc import Sequence as Tokens

from quire_server.core.request import FinishReason
from quire_server.core.sequence import Sequence


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Judges the newest token of the sequence."""
    length = len(sequence.tokens)
    if sequence.tokens[-1] in sequence.stop_ids and length > sequence.min_total:
        return FinishReason.STOP
    if length >= sequence.max_total:
        return FinishReason.LENGTH
    return None


def extend(sequence: Sequence, token_ids: Tokens[int]) -> tuple[int, FinishReason | None]:
    """Append tokens up to the one that ends the answer: (how many, why it ended)."""
    for count, token in enumerate(token_ids, start=1):
        sequence.tokens.append(token)
        if (reason := finish_reason(sequence)) is not None:
            return count, reason
    return len(token_ids), None
