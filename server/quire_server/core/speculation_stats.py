"""Speculative decoding in numbers, as the engine tells the API process. Filled by ``speculation``, exported
by ``speculation_metrics``.
"""

from typing import NamedTuple


class SpeculationStats(NamedTuple):
    """Counters since the start. A draft is one proposal of several tokens for one request."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # by place in the draft; as many as may be drafted
    pauses: int = 0  # times that a request stopped drafting for a while, since it did not pay
