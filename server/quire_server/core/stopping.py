"""When an answer ends, as far as token ids tell. Called by the scheduler after each sampled token."""

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
